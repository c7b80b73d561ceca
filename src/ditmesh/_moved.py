"""Former paths of modules and names, which go with the next release."""

from __future__ import annotations

from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .errors import warn_renamed

MOVED = {
    "drawing": "generate.job",
    "elastic": "generate.elastic",
    "loading": "generate.loading",
    "mesh": "comm.mesh",
    "model_info": "generate.model_info",
    "receipt": "generate.receipt",
    "study": "tools.study",
    "verification": "tools.verify",
}


def _smaller(config: Any, survivors: Any) -> Any:
    return config.resized(len(survivors), lost=set(range(config.world_size)) - set(survivors))


class MovedFinder:
    """Imports a module by its former path, and warns."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, *rest = name.split(".")
        if package != __package__ or not rest or rest[0] not in MOVED:
            return None
        return ModuleSpec(name, self, origin=".".join([package, MOVED[rest[0]], *rest[1:]]), is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        warn_renamed(spec.name, str(spec.origin))

    def exec_module(self, module: ModuleType) -> None:
        now = import_module(str(module.__spec__ and module.__spec__.origin))
        former = {f"{__package__}.elastic": {"smaller": _smaller}}.get(module.__name__, {})
        module.__dict__.update(former, __getattr__=lambda name: getattr(now, name))
