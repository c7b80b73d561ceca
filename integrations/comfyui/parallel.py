"""A MODEL of ComfyUI on several devices: any loader, any patches, any sampler, one model on all of them.

ComfyUI's process stays rank 0, with its own weights, its own sampler and its own device. Other processes hold copies of
the model that it samples with (`ditmesh.Followers`), and take part in every call of it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import inspect
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import host

if TYPE_CHECKING:
    from ditmesh.extend import FollowedModel, Followers, ParallelConfig

log = logging.getLogger(__name__)

KEY = "ditmesh"
# What the node's ranks share; stages and cut weights need blocks that are ComfyUI's own to move about.
DEGREES = ("ulysses", "ring", "cfg", "data")
# Options of a call that have done their work on rank 0 by then.
_DONE = ("wrappers", "callbacks", "uuids")
# The option in which a function stands that is called in the place of attention.
_OVERRIDE = "optimized_attention_override"
# Where options of a call hold functions of other nodes.
_PATCHES = ("patches", "patches_replace")


@dataclass(frozen=True)
class ModelSettings:
    """What the node is set to.

    Attributes:
        config: settings of `ParallelConfig`.
        check: whether the first call of every form is compared with one device.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    check: bool = True


class Branch:
    """What the node has put on one MODEL: it stands around ComfyUI's `BaseModel.apply_model`.

    Args:
        settings: of the node.
        config: the parallel configuration.
        device: type of the devices.
        gpus: their numbers, ComfyUI's first; None: on the CPU.
    """

    def __init__(
        self, settings: ModelSettings, config: ParallelConfig, device: str, gpus: tuple[int, ...] | None
    ) -> None:
        self.settings, self.config, self.device, self.gpus = settings, config, device, gpus
        # Whether the next call is the first of a sampling.
        self._begins = True

    def before_run(self, *_: Any) -> None:
        """A sampler begins."""
        self._begins = True

    def around(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """One call of the model by the sampler."""
        with one_sentence():
            return self._around(executor, *args, **kwargs)

    def _around(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        from ditmesh.extend import PipelineCall

        session = session_of(executor.class_obj, self)
        if self._begins:
            self._begins = False
            session.begin(_steps(kwargs, args))
        stand_in = PipelineCall(session.model, session.around)
        try:
            return executor(*args, **kwargs)
        finally:
            stand_in.undo()


def _steps(kwargs: Mapping[str, Any], args: tuple[Any, ...]) -> int | None:
    """Number of steps of a sampling, where ComfyUI says it."""
    for one in (*kwargs.values(), *args):
        if isinstance(one, dict) and (sigmas := one.get("sample_sigmas")) is not None:
            return max(1, len(sigmas) - 1)
    return None


class Session:
    """One diffusion model on the devices of one branch.

    Args:
        base: ComfyUI's model, which has it.
        branch: the settings.
        followers: the other ranks.
    """

    def __init__(self, base: Any, branch: Branch, followers: Followers) -> None:
        self._base = weakref.ref(base)
        self.model, self._branch, self._followers = base.diffusion_model, branch, followers
        self._checked: set[Any] = set()
        self._written: tuple[Any, frozenset[str]] = (None, frozenset())
        self._rewritten(base)
        with _by_value():
            self.followed: FollowedModel = followers.parallelize(self.model, branch.config, sleeps=True)
        self._parameters = _parameters(type(self.model))

    @property
    def usable(self) -> bool:
        """Whether it can be called."""
        return not self._followers.closed and not self.followed.closed

    def serves(self, base: Any, branch: Branch) -> bool:
        """Whether it is the session of this model and these settings."""
        mine = self._branch
        same = (mine.config, mine.device, mine.gpus) == (branch.config, branch.device, branch.gpus)
        return same and self.model is base.diffusion_model and self.usable

    def begin(self, steps: int | None) -> None:
        """A sampling begins."""
        self.followed.begin_request(steps)

    def close(self) -> None:
        """Leave the model as it was."""
        with contextlib.suppress(Exception):
            self.followed.close()

    def around(self, proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call of the diffusion model, by ComfyUI's `BaseModel`."""
        if self.followed.inside:
            return proceed(*args, **kwargs)
        self._refuse_training()
        options = kwargs.get("transformer_options") or {}
        inner = host.diffusion_model_wrappers(options)
        if not inner or not hasattr(type(self.model), "_forward"):
            return self._sent(proceed, args, kwargs)
        # The model's forward calls these wrappers, which are for one process, around its own `_forward`.
        taken = _parameters(type(self.model), "_forward")

        def sent(*given: Any, **named: Any) -> Any:
            vars(self.model).pop("_forward", None)
            return self._sent(proceed, (), {**dict(zip(taken, given, strict=False)), **named})

        vars(self.model)["_forward"] = sent
        try:
            return type(self.model).forward(self.model, *args, **kwargs)
        finally:
            vars(self.model).pop("_forward", None)

    def _sent(self, proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from ditmesh import LayoutError

        call = dict(zip(self._parameters, args, strict=False)) | kwargs
        options = call.get("transformer_options") or {}
        named = _named_patches(options)
        call["transformer_options"] = _options(options)
        # One device is asked with what the ranks do without.
        left_out = {name: options[name] for name in _of_wrappers(options)}
        if (override := options.get(_OVERRIDE)) is not None:
            self._check_override(override)
            left_out[_OVERRIDE] = override
        alone = {**call, "transformer_options": {**call["transformer_options"], **left_out}}
        form = (_form(call), tuple(sorted(named)))
        checks = self._branch.settings.check and form not in self._checked
        base = self._base()
        self.followed.sleep()
        try:
            truth = proceed(**_copied(alone)) if checks else None
            with _by_value(), self.followed.awake(), self._versions():
                # In inference mode torch counts no versions, by which this mode knows what a block has changed.
                given = _copied(call) if self._branch.config.reproducible else call
                out = self.followed.call(proceed, (), given, rewritten=self._rewritten(base))
        except LayoutError as error:
            raise LayoutError(_with_patches(str(error), named)) from error
        if checks:
            self._compare(out, truth, named)
            self._checked.add(form)
        return out

    def _refuse_training(self) -> None:
        """Refuse a call that is to have gradients: ComfyUI samples in inference mode, and nodes that train leave it."""
        import torch

        from ditmesh import InputError

        if torch.is_grad_enabled():
            raise InputError(
                f"{type(self.model).__name__} is called by a node that trains, and what runs on several devices passes "
                "no gradients on; put that node before Parallelize model"
            )

    def _check_override(self, override: Any) -> None:
        """Refuse an attention override that ranks would leave out.

        Raises:
            InputError: the configuration has attention of its own.
        """
        from ditmesh import InputError
        from ditmesh.extend import HANDED

        if self._branch.config.attention != HANDED:
            (name,) = list(_named_patches({_OVERRIDE: override}))[:1] or ["an attention override"]
            raise InputError(
                f"{name} cannot be used with {self._branch.config.describe()}, which computes attention by itself; use "
                "ulysses and cfg without reproducible and attention settings, or take the override off the model"
            )

    @contextlib.contextmanager
    def _versions(self) -> Iterator[None]:
        import torch

        if not self._branch.config.reproducible:
            yield
            return
        with torch.inference_mode(False), torch.no_grad():
            yield

    def _compare(self, out: Any, truth: Any, named: list[str]) -> None:
        """Refuse a result that one device does not have.

        Raises:
            LayoutError: it is off by more than its dtype allows.
        """
        from ditmesh import LayoutError
        from ditmesh.extend import result_error

        allowed, words = result_error(out, truth)
        if allowed > 1:
            text = (
                f"{type(self.model).__name__} on {self._branch.config.describe()} does not give what one device gives: "
                f"its result {words}; bypass the node Parallelize model"
            )
            raise LayoutError(_with_patches(text, named))

    def _rewritten(self, base: Any) -> frozenset[str]:
        """Weights that ComfyUI has written to in place since the last call: nothing on them shows it."""
        patcher = getattr(base, "current_patcher", None)
        hooks = getattr(patcher, "current_hooks", None)
        state = (getattr(base, "current_weight_patches_uuid", None), hooks)
        backup = getattr(patcher, "backup", None) or {}
        keys = [key for key, held in backup.items() if getattr(held, "inplace_update", False)]
        keys += list(getattr(patcher, "hook_backup", None) or ())
        names = frozenset(key.removeprefix("diffusion_model.") for key in keys)
        before, self._written = self._written, (state, names)
        same = before[0] is not None and before[0][0] == state[0] and before[0][1] is state[1] and before[1] == names
        return frozenset() if same else names | before[1]


def _options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a call as the model gets them on all ranks: attention through ditmesh, without what is done."""
    from ditmesh.extend import HandedAttention

    done = {*_DONE, *_of_wrappers(options)}
    given = {name: value for name, value in options.items() if name not in done}
    given[_OVERRIDE] = HandedAttention(options.get(_OVERRIDE))
    return given


def _of_wrappers(options: Mapping[str, Any]) -> list[str]:
    """Options with objects of a node's own class where no patch could use them: wrappers keep their state there."""
    if any(options.get(kind) for kind in _PATCHES):
        return []
    folders = tuple(folder + os.sep for folder in host.node_folders())

    def file_of(value: Any) -> str:
        return os.path.abspath(getattr(sys.modules.get(type(value).__module__), "__file__", None) or os.sep)

    return [name for name, value in options.items() if name not in _DONE and file_of(value).startswith(folders)]


def _parameters(kind: type[Any], method: str = "forward") -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = inspect.signature(getattr(kind, method)).parameters.values()
    return [one.name for one in found if one.kind in kinds][1:]


def _form(call: Mapping[str, Any]) -> Any:
    from ditmesh.extend import Arguments, form_of

    return form_of(Arguments((), (), dict(call)))


def _copied(value: Any) -> Any:
    """A copy of a call; its tensors may be written to."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return value


def _named_patches(options: Mapping[str, Any]) -> list[str]:
    """The functions that other nodes have put on a model, in words."""

    def inside(value: Any, where: tuple[Any, ...]) -> Iterator[str]:
        if isinstance(value, dict):
            for key, item in value.items():
                yield from inside(item, (*where, key))
        elif isinstance(value, (list, tuple)):
            for item in value:
                yield from inside(item, where)
        elif callable(value) or (value is not None and not isinstance(value, (str, int, float, bool))):
            named = value if hasattr(value, "__qualname__") else type(value)
            place = " ".join(" ".join(map(str, one)) if isinstance(one, tuple) else str(one) for one in where)
            yield f"{named.__qualname__} of {getattr(named, '__module__', '?')} ({place})"

    found = [name for kind in _PATCHES for name in inside(options.get(kind), (kind,))]
    if (override := options.get(_OVERRIDE)) is not None:
        found += inside(override, (_OVERRIDE,))
    return found


def _with_patches(text: str, named: list[str]) -> str:
    some = [*dict.fromkeys(named)][:4]
    return text if not some else f"{text}. Patches on the model: {'; '.join(some)}"


@contextlib.contextmanager
def _by_value() -> Iterator[None]:
    """Functions and classes of nodes are sent whole: ComfyUI imports nodes, its own too, by path and not by name."""
    import cloudpickle

    registered = []
    for module in _without_names(host.node_folders()):
        with contextlib.suppress(ValueError):
            cloudpickle.register_pickle_by_value(module)
            registered.append(module)
    try:
        yield
    finally:
        for module in registered:
            with contextlib.suppress(ValueError):
                cloudpickle.unregister_pickle_by_value(module)


def _without_names(folders: list[str]) -> list[Any]:
    """Modules of nodes in these folders that another process could not import by their names."""
    inside = tuple(os.path.abspath(folder) + os.sep for folder in folders)
    modules = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or not os.path.abspath(file).startswith(inside):
            continue
        try:
            known = importlib.util.find_spec(name.partition(".")[0]) is not None and name.isidentifier()
        except (ImportError, ValueError, AttributeError):
            known = False
        if not known:
            modules.append(module)
    return modules


# --- the ranks, which stay between prompts -----------------------------------------------------------------------

# One set of ranks: this process is one of them, and a process is in one process group.
_running: list[Followers] = []
_ATTRIBUTE = "_ditmesh_session"


def session_of(base: Any, branch: Branch) -> Session:
    """The session of a model, made when it is needed.

    Raises:
        DitmeshError: the model, its patches or the devices cannot do it.
    """
    # On the model itself: it goes when the model goes.
    held = vars(base).get(_ATTRIBUTE)
    if held is not None:
        if held.serves(base, branch):
            return held
        held.close()
        del vars(base)[_ATTRIBUTE]
    made = Session(base, branch, followers_for(branch.config.world_size, branch.device, branch.gpus))
    vars(base)[_ATTRIBUTE] = made
    return made


def followers_for(world_size: int, device: str, gpus: tuple[int, ...] | None) -> Followers:
    """The ranks beside ComfyUI, started when they are needed.

    Args:
        world_size: ComfyUI's process included.
        device: type of the devices.
        gpus: their numbers, ComfyUI's first; None: on the CPU.
    """
    from ditmesh import Followers
    from ditmesh.extend import allow_handed

    wanted = (world_size, device, gpus)
    while _running:
        current = _running[0]
        if not current.closed and current.wanted == wanted:
            return current
        close_followers()
    allow_handed()
    made = Followers(world_size, device, gpus=gpus, prepare=_preparation(host.root(), host.model_arguments()))
    made.wanted = wanted
    _running.append(made)
    return made


def close_followers() -> None:
    """End the ranks; the next prompt that needs them starts them again."""
    while _running:
        _running.pop().close()
    gc.collect()


def _preparation(folder: str, arguments: list[str]) -> Callable[[], None]:
    """What other ranks do first: they have ComfyUI's modules, with the same options."""

    def prepare() -> None:
        import sys

        sys.argv = arguments
        if folder not in sys.path:
            sys.path.insert(0, folder)
        import comfy.options

        comfy.options.enable_args_parsing()
        import comfy.cli_args

        from ditmesh.extend import allow_handed

        allow_handed()

    return prepare


@contextlib.contextmanager
def one_sentence() -> Iterator[None]:
    """A lost rank in one sentence; its traceback is in the log."""
    from ditmesh import RankFailed

    try:
        yield
    except RankFailed as error:
        first, _, rest = str(error).partition("\n")
        log.error("%s\n%s", first, rest)
        raise type(error)(first, error.rank, error.exit_code, error.lost, error.pool_open) from error.__cause__


# --- the node ----------------------------------------------------------------------------------------------------


def parallelized(model: Any, settings: ModelSettings, devices: int = 0) -> Any:
    """A clone of a MODEL that samples on several devices.

    Args:
        model: ComfyUI's `ModelPatcher`.
        settings: of the node.
        devices: number of ranks; 0: what the degrees multiply to.

    Raises:
        ConfigError: the configuration is not for this node, or the devices are not there.
        InputError: the model has no lists of blocks.
    """
    from ditmesh import ConfigError, InputError, ParallelConfig
    from ditmesh.extend import AXES, block_lists

    given = dict(settings.config)
    for name in AXES:
        if name not in DEGREES and given.get(name, 1) != 1:
            raise ConfigError(
                f"{name}={given[name]} is not for the node Parallelize model: each rank holds the whole model; "
                "use ulysses, ring and cfg"
            )
    if devices > 1 and not any(given.get(name, 1) != 1 for name in DEGREES):
        given["ulysses"] = devices
    config = ParallelConfig.read(given)
    if config.cuts_weights:
        raise ConfigError(f"{config.describe()} cuts weights, which ComfyUI patches and moves; leave that out")
    if devices and devices != config.world_size:
        raise ConfigError(f"{config.describe()} is for {config.world_size} devices, and devices is {devices}")
    if config.world_size == 1:
        return model
    inner = getattr(model.model, "diffusion_model", None)
    if inner is None or not block_lists(inner) or hasattr(inner, "input_blocks"):
        raise InputError(
            f"{type(inner or model.model).__name__} is no Diffusion Transformer: its tokens cannot be shared out; use "
            "the MODEL without the node Parallelize model"
        )
    if config.attention is None and config.ring == 1 and not config.reproducible:
        config = config.model_copy(update={"attention": "handed"})
    device, gpus = host.devices_of(model, config.world_size)
    branch = Branch(settings, config, device, gpus)
    made = model.clone()
    host.put_around(made, KEY, branch.around, branch.before_run)
    return made


class ParallelizeModel:
    """Runs a MODEL of ComfyUI on several devices."""

    CATEGORY, FUNCTION = "ditmesh", "parallelize"
    RETURN_TYPES, RETURN_NAMES = ("MODEL",), ("model",)
    DESCRIPTION = (
        "Samples with this model on several devices at once. Put it between any loader or LoRA loader and any sampler. "
        "The picture stays that of one device."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        def number(default: int, most: int, tooltip: str, least: int = 1) -> tuple[str, dict[str, Any]]:
            return "INT", {"default": default, "min": least, "max": most, "tooltip": tooltip}

        return {
            "required": {
                "model": ("MODEL", {"tooltip": "From any loader, with any LoRAs and patches."}),
                "ulysses": number(2, 64, "Devices that share the tokens and swap attention heads."),
                "ring": number(1, 64, "Devices that share the tokens and pass keys and values on."),
                "cfg": number(1, 3, "2: the branches of guidance are shared out, where ComfyUI runs both in one call."),
            },
            "optional": {
                "devices": number(
                    0,
                    512,
                    "Number of devices. 0: as many as the degrees multiply to. With all degrees at 1 it is ulysses.",
                    least=0,
                ),
                "settings": (
                    "STRING",
                    {
                        "default": "",
                        "tooltip": 'More of the configuration, such as "reproducible" or "exchange=displaced".',
                    },
                ),
                "check": (
                    "BOOLEAN",
                    {
                        "default": True,
                        "tooltip": "Compares the first call of every form with one device, and refuses a model or a "
                        "patch for which they differ.",
                    },
                ),
            },
        }

    def parallelize(
        self, model: Any, devices: int = 0, settings: str = "", check: bool = True, **degrees: int
    ) -> tuple[Any]:
        from ditmesh import ConfigError
        from ditmesh.extend import parse_settings

        config = {name: degree for name, degree in degrees.items() if degree != 1}
        given = parse_settings(settings)
        if twice := given.keys() & config.keys():
            raise ConfigError(f"{min(twice)} stands in a widget and in settings; leave one out")
        return (parallelized(model, ModelSettings(config | given, check), devices),)
