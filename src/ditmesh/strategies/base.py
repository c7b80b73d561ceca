"""The interface of strategies: ways of distributing a pipeline's work over ranks.

The engine builds one `Context`, makes every strategy of its recipe that the configuration wants, and applies them in
the recipe's order, from the inside of a call to its outside. What one leaves for another it adds to a `Parts`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Literal, TypeVar

from torch import nn

from ..comm.mesh import Mesh
from ..config import ParallelConfig
from ..core.arguments import Arguments
from ..core.clock import CallClock
from ..core.patching import CallChain
from ..errors import ConfigError
from ..layout import TokenLayout

T = TypeVar("T")
# Arguments of a pipeline's call.
CallArguments = tuple[tuple[Any, ...], dict[str, Any]]
# A strategy's guarantee for an image compared with one device: the same bits, a tolerance, or none.
Promise = Literal["bits", "tolerance", "none"]


class Parts:
    """Objects that strategies share with one another, by type."""

    def __init__(self) -> None:
        self._parts: list[Any] = []

    def add(self, part: T) -> T:
        """Add ``part`` for the strategies after this one; returns it."""
        self._parts.append(part)
        return part

    def find(self, kind: type[T]) -> T | None:
        """The latest part of a type; None: no strategy has left one."""
        return next((part for part in reversed(self._parts) if isinstance(part, kind)), None)

    def get(self, kind: type[T]) -> T:
        """The latest part of a type, which must be there: a strategy further in the recipe leaves it."""
        part = self.find(kind)
        if part is None:
            raise LookupError(f"no strategy of the recipe has left a {kind.__name__} for those after it")
        return part


class ParallelModel(Parts):
    """One denoising transformer with the objects of its strategies, and the chain of all that wraps its forward.

    ``prefix`` tells the blocks of several transformers apart in logs.
    """

    def __init__(self, model: nn.Module, layout: TokenLayout, prefix: str = "") -> None:
        super().__init__()
        self.model, self.layout, self.prefix = model, layout, prefix
        self.chain = CallChain(model)


class Context(Parts):
    """The context that strategies are applied to.

    Attributes:
        job: all ranks and their links.
        mesh: those that share a request: without the data axis where every data rank brings its own.
        models: the transformers that the ranks share.
        clock: says which call of them is in progress.
        pipe: the pipeline of the request in progress, or of the latest one; None for bare transformers.
    """

    def __init__(self, config: ParallelConfig, job: Mesh, models: list[ParallelModel]) -> None:
        super().__init__()
        self.config = config
        self.job = job
        self.mesh = job.data_group() if config.inputs == "per-data-rank" else job
        self.models = models
        self.pipe: Any = None
        self.clock = CallClock(lambda: getattr(self.pipe, "scheduler", None))


@dataclass(frozen=True)
class Request:
    """One call of a pipeline, or a request that a bare transformer's user opens.

    Attributes:
        pipe: the pipeline; None for a bare transformer.
        steps: number of denoising steps, if known; some warm-up policies need it.
    """

    pipe: Any = None
    steps: int | None = None


@dataclass(frozen=True)
class LaterStrategy:
    """A line of a recipe whose module is imported when a configuration asks for it.

    Attributes:
        path: of its class in this folder, such as ``"stale.displaced:Naive"``.
        asked: whether a configuration may want it, without its module; its own ``wanted`` decides.
    """

    path: str
    asked: Callable[[ParallelConfig], bool]

    def load(self) -> type[Strategy]:
        """The strategy."""
        module, name = self.path.split(":")
        return getattr(import_module(f".{module}", __package__), name)


Recipe = tuple["type[Strategy] | LaterStrategy", ...]


def wanted(recipe: Recipe, config: ParallelConfig) -> list[type[Strategy]]:
    """The strategies of a recipe that a configuration asks for, in order."""
    asked = [line for line in recipe if not isinstance(line, LaterStrategy) or line.asked(config)]
    strategies = [line.load() if isinstance(line, LaterStrategy) else line for line in asked]
    return [strategy for strategy in strategies if strategy.wanted(config)]


class Strategy:
    """One line of a recipe. Everything it may do has a default that does nothing.

    ``context``: of the models to which it will be applied; nothing has been changed yet.
    """

    # As messages and docs call it.
    name: ClassVar[str] = ""
    # The strategy's guarantee of the same image; the weakest guarantee of a recipe applies.
    promise: ClassVar[Promise] = "tolerance"
    # The reason why no gradient passes through it, a clause; empty: one does.
    no_gradient: ClassVar[str] = ""
    # Its name in the support table, in the place of `key_of_axis` or behind the axes; empty: the axes alone name it.
    key: ClassVar[str] = ""
    key_of_axis: ClassVar[str] = ""

    def __init__(self, context: Context) -> None:
        self.context = context

    @classmethod
    def keeps_between_steps(cls, config: ParallelConfig) -> str:
        """The data of a request's previous step that it keeps, as a clause; such requests cannot be batched."""
        return ""

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        """True if a configuration asks for it."""
        raise NotImplementedError

    @classmethod
    def check(cls, config: ParallelConfig, model: nn.Module, layout: TokenLayout) -> None:
        """Reject unsupported settings before any rank begins: `ConfigError` with model, value and way out."""

    def prepare(self, pipe: Any) -> None:
        """Look at a pipeline (None: bare transformers) before any strategy has changed anything."""

    def apply(self, undo: ExitStack) -> None:
        """Install the strategy, and push its removal onto ``undo``. Called once, in the recipe's order."""

    def attach(self, pipe: Any, undo: ExitStack) -> None:
        """Attach to a pipeline that uses the transformers, for its other components."""

    def arguments(self, pipe: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
        """The arguments that a pipeline's call is to run with."""
        return args, kwargs

    def begin_request(self, request: Request) -> None:
        """Begin a request, independent of the previous one."""

    def end_request(self, failed: bool) -> None:
        """The request is over; ``failed``: other ranks may be gone, and nothing may be asked of them."""

    def forget(self) -> None:
        """Reset agreed state, on all ranks alike: after a failure, by which ranks may differ, links were renewed."""

    def outside_request(self, arguments: Arguments) -> None:
        """A transformer is called outside of any request of its pipeline: `InputError` if the result would be wrong."""

    def before_training(self, model: nn.Module, arguments: Arguments) -> None:
        """Gradients are to pass through a call: `ConfigError` if none can, `InputError` if they would be wrong."""
        if self.no_gradient:
            raise ConfigError(
                f"{self.context.config.describe()} cannot be trained: {self.no_gradient}; call the model under "
                "torch.no_grad(), or train with ulysses, ring, tensor and data"
            )

    def notes(self) -> list[str]:
        """Messages to the user about the latest request, in sentences."""
        return []

    def result(self, value: Any) -> Any:
        """The result that a pipeline's call returns."""
        return value
