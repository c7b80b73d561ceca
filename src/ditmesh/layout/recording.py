"""Runs of a transformer that record what its blocks take, ask of attention, and return."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..core import intercept
from ..core.arguments import Arguments, parameter_names
from ..errors import LayoutError


class AttentionCall(NamedTuple):
    """Queries, keys, values and output of one attention call, (B, H, S, D) each."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    output: Tensor


@dataclass
class BlockRun:
    """One block in one run: its arguments, the tensors and integers among them by path, and what it returned.

    ``single`` says that this was one tensor, and no tuple.
    """

    arguments: Arguments
    leaves: dict[str, Any]
    attention: list[AttentionCall] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    single: bool = False


@dataclass
class Run:
    """Blocks of one run by path (``"transformer_blocks.0"``), in the order they ran, and the model's output."""

    blocks: dict[str, BlockRun]
    output: list[Tensor]


class Recorder:
    """Runs a model and records its blocks.

    Args:
        model: the transformer.

    Attributes:
        lists: its lists of blocks, by path; see `block_lists`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.lists = block_lists(model)

    def run(self, inputs: Mapping[str, Any]) -> Run:
        """Run the model on ``inputs``, arguments of its forward by name."""
        runs: dict[str, BlockRun] = {}
        attention = _Attention()

        def hooked(block: nn.Module, site: str, names: tuple[str, ...]) -> Iterator[Any]:
            def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                arguments = Arguments(names, args, kwargs)
                runs[site] = BlockRun(arguments, dict(arguments.leaves()))
                attention.calls = runs[site].attention

            def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
                runs[site].single, runs[site].results = isinstance(output, Tensor), _as_list(output)
                attention.calls = []

            yield block.register_forward_pre_hook(before, with_kwargs=True)
            yield block.register_forward_hook(after)

        with ExitStack() as stack:
            for path, blocks in self.lists.items():
                for index, block in enumerate(blocks):
                    for handle in hooked(block, f"{path}.{index}", parameter_names(type(block).forward)):
                        stack.enter_context(handle)
            stack.enter_context(intercept.handled_by(attention))
            output = self.model(**inputs)
        return Run(runs, [value for _, value in Arguments((), (output,), {}).leaves() if isinstance(value, Tensor)])

    def replay(
        self, run: Run, site: str, path: str, value: Any, computed: Sequence[int] = ()
    ) -> tuple[list[Any], list[AttentionCall]]:
        """Run one block alone with one argument changed, while its attention answers what it did in ``run``.

        Args:
            run: the run before.
            site: path of the block.
            path: path of the argument.
            value: its new value.
            computed: numbers of the attention calls that are computed after all.

        Returns:
            What the block returned, as a list; every attention call that was answered from memory.

        Raises:
            LayoutError: the block attends more often than before.
        """
        before = run.blocks[site]
        arguments = Arguments(before.arguments.names, tuple(before.arguments.args), before.arguments.kwargs)
        arguments.set(path, value)
        attention = _Attention(before.attention, computed)
        with intercept.handled_by(attention):
            output = self.model.get_submodule(site)(*arguments.args, **arguments.kwargs)
        return _as_list(output), [call for number, call in enumerate(attention.calls) if number not in computed]


class _Attention:
    """Attention handler that records calls; it computes them, or gives the answers of an earlier run of the block."""

    def __init__(self, answers: list[AttentionCall] | None = None, computed: Sequence[int] = ()) -> None:
        self.calls: list[AttentionCall] = []
        self._answers, self._computed = answers, computed

    def attend(
        self, q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        number = len(self.calls)
        if self._answers is None or number in self._computed:
            out = intercept.sdpa(q_bhsd, k_bhsd, v_bhsd, attn_mask=mask, scale=scale)
        elif number >= len(self._answers):
            raise LayoutError("a block makes more attention calls when one of its tokens changes")
        else:
            out = self._answers[number].output
        self.calls.append(AttentionCall(q_bhsd, k_bhsd, v_bhsd, out))
        return out


def _as_list(output: Any) -> list[Any]:
    return [output] if isinstance(output, Tensor) else list(output)


def block_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """The model's ModuleLists that are not inside another list's block, by path."""
    lists: dict[str, nn.ModuleList] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(other + ".") for other in lists)
        if isinstance(module, nn.ModuleList) and len(module) and not inside:
            lists[path] = module
    return lists


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """The model without hooks and without replaced forwards: whoever has put them there is not to see these runs."""
    kinds = [name for name in vars(model) if name.startswith(("_forward_hooks", "_forward_pre_hooks"))]
    saved = [(vars(module), {name: vars(module)[name] for name in kinds}) for module in model.modules()]
    forwards = [(own, own.pop("forward")) for own, _ in saved if "forward" in own]
    for own, hooks in saved:
        own.update({name: type(held)() for name, held in hooks.items()})
    try:
        yield
    finally:
        for own, hooks in saved:
            own.update(hooks)
        for own, forward in forwards:
            own["forward"] = forward
