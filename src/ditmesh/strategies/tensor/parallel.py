"""Tensor parallelism: every rank holds a slice of the weights and all of the tokens.

After Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053): attention is cut by whole heads and feed-forwards by
inner features, so that a pair of linears needs one all-reduce and no other exchange. Weights are plain local
tensors, so adapters, other axes and every backend work as they do on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from ...comm import Link
from ...comm.autograd import enter_slices, gather_features, leave_slices, sum_of_slices
from ...config import ParallelConfig
from ...core.arguments import Arguments, covers, parameter_names
from ...core.objects import kept_tensors
from ...core.partition import Partition
from ...core.patching import Patch, Proceed, refuse_loading, refuse_reading, refuse_saving, wrap_methods
from ...core.values import tracked
from ...errors import ConfigError, InputError
from ...layout import Table, TokenLayout
from ..base import Strategy
from ..heads import check_heads, heads_of
from ..pipefusion.stages import shape_of, whole_or_refused
from .slices import Site, TensorPlan, base_layer_of, norm_width, plan_slices, share_cut

# Of the parameters in a model's blocks: less cut than this is refused.
LEAST_SHARE = 0.1


class TensorParallel:
    """Splits a transformer's weights over the ranks of a link, in place; `close` is the exact inverse.

    LoRA adapters (peft) may be loaded before or after: they are cut like the layers they adapt, at the next call
    of the transformer, and nothing else about them changes.

    Args:
        model: with the same weights on every rank, or with this rank's slices as `ditmesh.load` leaves them.
        plan: of the slices; None: that of `plan_slices`.

    Raises:
        ConfigError: a module has fewer heads than the link has ranks.
        InputError: a weight that should be cut is not a plain tensor, or not there (on the meta device); or attention
            processors have weights, which no rule cuts.
    """

    def __init__(self, model: nn.Module, link: Link, plan: TensorPlan | None = None) -> None:
        self.model = model
        self.link = link
        self.plan = plan or plan_slices(model, link.size)
        if (share := share_cut(model, self.plan)) < LEAST_SHARE:
            raise ConfigError(
                f"tensor={link.size} cuts {share:.0%} of the parameters in the blocks of {type(model).__name__}, whose "
                "linear layers are not named as in the models that ditmesh has rules for: it would share out neither "
                "memory nor work; use shard for memory, and ulysses, ring, cfg or data"
            )
        self._undo = ExitStack()
        self._places = [
            (site, model.get_submodule(parent), name)
            for site in self.plan.sites
            if site.kind != "norm"
            for parent, _, name in [site.path.rpartition(".")]
        ]
        self._attentions = [(path, one) for path, one in model.named_modules() if hasattr(one, "processor")]
        self._check_processors()
        # The owner of a site's hooks: the linear, or the adapter wrapped around it.
        self._hung: dict[tuple[str, str], tuple[nn.Module, RemovableHandle]] = {}
        # The input of the latest column-split linear of a call, and its result.
        self._entered: tuple[Tensor, int, Tensor] | None = None
        # Hooks on the gradients of parameters, by parameter.
        self._completed: MutableMapping[Tensor, RemovableHandle] = WeakTensorKeyDictionary()
        for site in self.plan.sites:
            _check_plain(site, self._base(site))
        for site in self.plan.sites:
            self._cut(site, _base_parameters(site, self._base(site)))
        for path, name, values in self.plan.attributes:
            own = vars(model.get_submodule(path))
            self._undo.callback(own.__setitem__, name, own[name])
            own[name] = values[link.rank]
        for site in self.plan.sites:
            if site.kind == "norm":
                norm = model.get_submodule(site.path)
                over_ranks: Any = _norm_over_ranks(norm, link)
                over_ranks.brings_weights = True
                self._undo.callback(Patch(norm, "forward", over_ranks))
        for path, table, cut in self.plan.tables:
            module = model.get_submodule(path)
            slicer: Any = _table_slicer(module, table, cut, link)
            slicer.brings_weights = True
            self._undo.callback(module.register_forward_pre_hook(slicer, with_kwargs=True).remove)
        error = InputError("saving would write this rank's slices only; call ditmesh.restore(...) first")
        self._undo.callback(refuse_saving(model, error))
        self._undo.callback(refuse_loading(model, self.spread, "this rank's slices"))
        self._undo.callback(refuse_reading(model, self.spread, "this rank's slice"))
        names = ("fuse_lora", "fuse_qkv_projections", "unfuse_qkv_projections", "load_lora_adapter")
        self._undo.callback(wrap_methods(model, names, self._call_guarded))
        self._follow_adapters()
        # Adapters come and go between calls; looking once a call is cheap and misses none.
        before: Any = partial(self._before_call)
        before.brings_weights = True
        self._undo.callback(model.register_forward_pre_hook(before, prepend=True, with_kwargs=True).remove)
        self._undo.callback(model.register_forward_hook(self._forget_entered, always_call=True).remove)

    def close(self) -> None:
        """Make the model whole again, bit for bit, adapters included. Collective; see `whole_or_refused`."""
        self._undo.close()
        for handle in (*(handle for _, handle in self._hung.values()), *self._completed.values()):
            handle.remove()
        self._hung.clear()
        self._completed.clear()
        with whole_or_refused(self.model):
            self.gather_adapters()
            for site in self.plan.sites:
                self._gather(site, _base_parameters(site, self._base(site)))

    # --- weights -----------------------------------------------------------------------------------------

    def _base(self, site: Site) -> nn.Module:
        return base_layer_of(self.model.get_submodule(site.path))

    def _linears(self) -> Iterator[tuple[Site, nn.Module]]:
        """Every linear that is cut, as it is now: adapters wrap it and go away again."""
        for site, parent, name in self._places:
            outer = parent._modules[name]
            assert outer is not None
            yield site, outer

    def _cut(self, site: Site, parameters: Iterable[tuple[nn.Parameter, int | None]]) -> None:
        """Cut those of a site's parameters that are whole to this rank's slices."""
        rank = self.link.rank
        with torch.no_grad():
            for parameter, dim in parameters:
                if dim is None:
                    # Added once: the other ranks add nothing. One in pieces was read so.
                    if rank > 0 and parameter.numel():
                        parameter.data = torch.zeros_like(parameter.data)
                elif shape_of(parameter)[dim] == site.cut.total:
                    parameter.data, parameter.grad = site.cut.copy(parameter.data, dim, rank), None

    def _gather(self, site: Site, parameters: Iterable[tuple[nn.Parameter, int | None]]) -> None:
        """The inverse of `_cut`. Collective over the link."""
        lengths = site.cut.lengths
        with torch.no_grad():
            for parameter, dim in parameters:
                if hasattr(parameter, "full_tensor"):
                    raise RuntimeError("FSDP2 holds shards of its slices")
                mine = parameter.data.contiguous()
                if dim is None:
                    parameter.data = self.link.broadcast(mine if self.link.rank == 0 else torch.empty_like(mine), 0)
                elif mine.shape[dim] != site.cut.total:
                    pieces = self.link.all_gather(mine, lengths, dim).split(lengths, dim)
                    parameter.data, parameter.grad = site.cut.join(pieces, dim), None

    # --- hooks -------------------------------------------------------------------------------------------

    def _call_guarded(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the model that adds or fuses adapters."""
        if name.endswith("fuse_qkv_projections"):
            raise InputError(
                f"{name}() was called with tensor={self.link.size}, and ranks hold slices of the projections; call "
                f"ditmesh.restore(...), {name}(), and parallelize again"
            )
        if name == "fuse_lora":
            # Adapters are added to weights that are cut: they must be cut alike, even before the first call.
            self._follow_adapters()
        if name == "load_lora_adapter" and kwargs.get("hotswap"):
            # It copies into the tensors that are there: they must have their whole size.
            self.gather_adapters()
        return method(*args, **kwargs)

    def _check_processors(self) -> None:
        """Reject attention processors with weights (an IP-Adapter's), which would get only a part of the heads."""
        for path, attention in self._attentions:
            processor: Any = attention.processor
            if isinstance(processor, nn.Module) and next(processor.parameters(), None) is not None:
                raise InputError(
                    f"the processor of {path}, {type(processor).__name__}, has weights of its own, which tensor="
                    f"{self.link.size} does not cut (an IP-Adapter's); unload it, or use ulysses, ring, cfg or data"
                )

    def _before_call(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Look whether processors or adapters were changed since the last call, and for keys of all heads."""
        for place, name, keys in kept_tensors(Arguments((), args, kwargs)):
            # A pipeline has made room for them: (2, B, H, S, D).
            heads = (keys.shape[2], keys.shape[4]) if keys.dim() == 5 and keys.shape[0] == 2 else (0, 0)
            if heads in self.plan.kept:
                place[name] = self.plan.kept[heads].copy(keys, 2, self.link.rank)
        self._check_processors()
        self._follow_adapters()
        if torch.is_grad_enabled():
            self._follow_gradients()

    def _forget_entered(self, *_: Any) -> None:
        self._entered = None

    def _epilogue(self, site: Site) -> Callable[..., Tensor]:
        """A hook that completes the output of a site's linear: the sum, or the features, of all ranks."""
        link, lengths = self.link, site.cut.lengths

        def add_up(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
            return leave_slices(link, output)

        def gather(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
            # Values that were computed ahead are whole already.
            if output.shape[-1] == site.cut.total:
                return output
            return gather_features(link, output.contiguous(), lengths, output.dim() - 1)

        epilogue: Any = add_up if site.kind == "row" else gather
        epilogue.brings_weights = epilogue.completes = True
        return epilogue

    # --- adapters ----------------------------------------------------------------------------------------

    def _follow_adapters(self) -> None:
        """Cut adapters that are still whole, and hang every epilogue behind base and adapters together."""
        for site, outer in self._linears():
            if site.kind not in ("column", "table") and self._lacks("epilogue", site.path, outer):
                self._hung["epilogue", site.path] = outer, outer.register_forward_hook(self._epilogue(site))
            self._cut(site, _adapter_parameters(site, outer))

    def _lacks(self, kind: str, path: str, module: nn.Module) -> bool:
        """True if the module at a path has no hook of a kind yet; that of the module that was there is taken off."""
        hung = self._hung.get((kind, path))
        if hung is not None and hung[0] is not module:
            hung[1].remove()
        return hung is None or hung[0] is not module

    # --- gradients ---------------------------------------------------------------------------------------

    def _follow_gradients(self) -> None:
        """Install hooks that complete gradients: of inputs of column-split linears, and of weights between slices.

        Every rank has the gradients of its own slices; gradients of whole weights get a part from every rank.
        """
        for site, outer in self._linears():
            if site.kind in ("column", "gathered") and self._lacks("prologue", site.path, outer):
                self._hung["prologue", site.path] = outer, outer.register_forward_pre_hook(self._prologue)
            for parameter, whole in _adapter_gradients(site, outer):
                self._complete(parameter, self._added_once if whole else self.link.all_reduce)
            if site.kind == "row":
                self._complete_in_calls(site.path, base_layer_of(outer), "bias", self._added_once)
        for name in self.plan.between:
            path, _, own = name.rpartition(".")
            self._complete_in_calls(path, self.model.get_submodule(path), own, self.link.all_reduce)

    def _complete_in_calls(self, path: str, module: nn.Module, name: str, change: Callable[[Tensor], Tensor]) -> None:
        """Complete the gradient of a module's parameter, found in its call: outside of it FSDP2 has a shard there."""
        if not self._lacks(name, path, module):
            return

        def found(*_: Any) -> None:
            if (parameter := module._parameters.get(name)) is not None:
                self._complete(parameter, change)

        self._hung[name, path] = module, module.register_forward_pre_hook(found)

    def _prologue(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Before a column-split linear. One after another of the same tensor (queries, keys, values) share one sum."""
        given = args[0]
        # Recomputation by checkpointing in backward passes no gradient on, and its tensors are not to be kept.
        if torch.compiler.is_compiling() or not tracked(given) or torch._C._current_graph_task_id() != -1:
            return enter_slices(self.link, given), *args[1:]
        if self._entered is None or self._entered[0] is not given or self._entered[1] != given._version:
            self._entered = given, given._version, enter_slices(self.link, given)
        return self._entered[2], *args[1:]

    def _complete(self, parameter: nn.Parameter, change: Callable[[Tensor], Tensor]) -> None:
        if parameter.requires_grad and parameter not in self._completed:
            # A gradient that is handed to a hook is not to be written to.
            self._completed[parameter] = parameter.register_hook(lambda gradient: change(gradient.clone()))

    def _added_once(self, gradient: Tensor) -> Tensor:
        """The gradient of a parameter that only the first rank holds; zeros stay on the others."""
        return gradient if self.link.rank == 0 else torch.zeros_like(gradient)

    def spread(self) -> set[int]:
        """Ids of the parameters that are this rank's slices at the moment. Adapters are whole until the next call."""
        ids: set[int] = set()
        for site in self.plan.sites:
            base = self._base(site)
            # Of a slice that was quantised since, the parts it is kept in.
            quantised = site.kind != "norm" and "weight" not in base._parameters
            ids.update(map(id, base.parameters() if quantised else (p for p, _ in _base_parameters(site, base))))
        for site, outer in self._linears():
            parameters = _adapter_parameters(site, outer)
            ids.update(id(p) for p, dim in parameters if dim is None or shape_of(p)[dim] != site.cut.total)
        return ids

    def whole_shapes(self) -> dict[Tensor, torch.Size]:
        """The whole shapes of the weights of which this rank holds a slice."""
        return {
            parameter: whole_shape(parameter, dim, site.cut)
            for site in self.plan.sites
            for parameter, dim in _base_parameters(site, self._base(site))
            if dim is not None
        }

    def gather_adapters(self) -> None:
        """Make the adapters whole again; the next call cuts them again. Collective over the link."""
        for site, outer in self._linears():
            self._gather(site, _adapter_parameters(site, outer))


def _norm_over_ranks(norm: nn.Module, link: Link) -> Callable[[Tensor], Tensor]:
    """The forward of an RMS norm over features that lie on all ranks: (..., features of this rank)."""
    width = norm_width(norm)
    assert width is not None

    def forward(hidden_states: Tensor) -> Tensor:
        wide = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        squares = sum_of_slices(link, wide.square().sum(-1, keepdim=True))
        eps = getattr(norm, "eps", None)
        # torch.nn.RMSNorm's default
        eps = torch.finfo(hidden_states.dtype).eps if eps is None else eps
        out = wide * torch.rsqrt(squares / width + eps)
        weight, bias = norm._parameters.get("weight"), norm._parameters.get("bias")
        if weight is None:
            return out.to(hidden_states.dtype)
        if isinstance(norm, nn.RMSNorm):
            return (out * weight).to(hidden_states.dtype)
        # diffusers' RMSNorm rounds before it applies a half-precision weight.
        out = out.to(weight.dtype) * weight
        return out if bias is None else out + bias

    return forward


def whole_shape(parameter: Tensor, dim: int | None, cut: Partition | None) -> torch.Size:
    """The shape of a parameter of which this rank holds a slice."""
    shape = list(shape_of(parameter))
    if dim is not None and cut is not None:
        shape[dim] = cut.total
    return torch.Size(shape)


def already_cut(model: nn.Module, degree: int) -> set[str]:
    """Names of parameters that hold one rank's slice, as `ditmesh.load` leaves them."""
    names: set[str] = set()
    for site in plan_slices(model, degree).sites:
        base = base_layer_of(model.get_submodule(site.path))
        weight = base._parameters.get("weight")
        if weight is not None and shape_of(weight)[site.dim] != site.cut.total:
            # With the weight its bias is cut too, or zero on all ranks but one.
            names.update(f"{site.path}.{name}" for name in ("weight", "bias") if base._parameters.get(name) is not None)
    return names


def _base_parameters(site: Site, base: nn.Module) -> Iterator[tuple[nn.Parameter, int | None]]:
    """A site's parameters with the dimension that is cut; None: the first rank holds it whole, the others zeros."""
    for name in ("weight", "bias"):
        parameter = base._parameters.get(name)
        if parameter is not None:
            yield parameter, site.dim_of(name)


def adapter_cuts(model: nn.Module, made: TensorPlan) -> Iterator[tuple[str, int | None, Partition | None]]:
    """Every parameter of whole adapters that ranks will cut, as `TensorPlan.parameters` has those of the model."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for site in made.sites:
        if site.kind == "norm":
            continue
        for parameter, dim in _adapter_parameters(site, model.get_submodule(site.path)):
            yield names[id(parameter)], dim, None if dim is None else site.cut


def _adapter_parameters(site: Site, outer: nn.Module) -> Iterator[tuple[nn.Parameter, int | None]]:
    """The parameters of a layer's adapters, if it has any, that follow its cut."""
    if outer is base_layer_of(outer):
        return
    lora_a, lora_b = outer._modules.get("lora_A"), outer._modules.get("lora_B")
    variants = getattr(outer, "lora_variant", None)
    if not isinstance(lora_a, nn.ModuleDict) or not isinstance(lora_b, nn.ModuleDict) or variants:
        kind = f"{type(outer).__name__} with {', '.join(variants)}" if variants else type(outer).__name__
        raise InputError(
            f"{site.path} is adapted by {kind}; tensor parallelism knows plain LoRA only. Fuse the adapter into the "
            "weights before parallelize(), or use ulysses or ring"
        )
    side = lora_a if site.kind == "row" else lora_b
    for name in sorted(side):
        weight = side[name]._parameters.get("weight")
        bias = lora_b[name]._parameters.get("bias")
        if weight is not None:
            yield weight, site.dim_of("weight")
        if bias is not None:
            yield bias, site.dim_of("bias")


def _adapter_gradients(site: Site, outer: nn.Module) -> Iterator[tuple[nn.Parameter, bool]]:
    """Adapters' parameters of a layer, and whether only the first rank has their gradient; else each has a part."""
    cut = {id(parameter): dim for parameter, dim in _adapter_parameters(site, outer)}
    if outer is base_layer_of(outer):
        return
    for name in ("lora_A", "lora_B"):
        for parameter in outer.get_submodule(name).parameters():
            if cut.get(id(parameter)) is None:
                yield parameter, id(parameter) in cut


def _check_plain(site: Site, base: nn.Module) -> None:
    """Slices are taken of plain floating-point tensors that are really there."""
    weight = base._parameters.get("weight")
    if weight is None:
        if site.kind != "norm":
            raise InputError(f"{site.path} ({type(base).__name__}) has no weight of its own to cut")
        return
    if weight.is_meta:
        raise InputError(
            f"the weight of {site.path} is not loaded (it is on the meta device); take off CPU offloading, or load the "
            "model with ditmesh.load()"
        )
    dimensions = 1 if site.kind == "norm" else 2
    # Fake ones are cut to see what that takes.
    plain = type(weight.data) in (Tensor, FakeTensor) and weight.is_floating_point()
    if not plain or len(shape_of(weight)) != dimensions:
        raise InputError(
            f"the weight of {site.path} ({type(base).__name__}) is {type(weight).__name__} of {weight.dtype} with "
            f"shape {tuple(weight.shape)}; tensor parallelism cuts plain floating-point weights. Use ulysses or ring "
            "with quantised models"
        )


def _table_slicer(module: nn.Module, table: Table, cut: Partition, link: Link) -> Callable[..., Any]:
    names = parameter_names(type(module).forward)
    start, length = cut.runs(link.rank)[0][0], cut.lengths[link.rank]

    def slice_tables(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        arguments = Arguments(names, args, kwargs)
        for path, value in list(arguments.leaves()):
            if not covers(table.argument, path) or not isinstance(value, Tensor) or value.dim() != table.ndim:
                continue
            if value.shape[table.dim] == cut.total:
                arguments.set(path, enter_slices(link, value).narrow(table.dim, start, length))
        return tuple(arguments.args), arguments.kwargs

    return slice_tables


class TensorSlices(Strategy):
    """Tensor parallelism of every transformer of a pipeline."""

    name = "tensor"

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        return config.tensor > 1

    @classmethod
    def check(cls, config: ParallelConfig, model: nn.Module, layout: TokenLayout) -> None:
        check_heads(config, heads_of(model, layout), type(model).__name__)

    def before_training(self, model: nn.Module, arguments: Arguments) -> None:
        for each in self.context.models:
            if each.model is model and (names := each.get(TensorParallel).plan.unknown):
                raise ConfigError(
                    f"{type(model).__name__} cannot be trained with tensor={self.context.config.tensor}: whether every "
                    f"rank has a part of the gradient of {names[0]} is not known; use ulysses or ring"
                )

    def apply(self, undo: ExitStack) -> None:
        for model in self.context.models:
            undo.callback(model.add(TensorParallel(model.model, self.context.mesh.tensor)).close)
            if model.layout.source != "reviewed":
                undo.callback(model.chain.add(partial(self._around_call, type(model.model).__name__)))

    def _around_call(self, name: str, proceed: Proceed, arguments: Arguments) -> Any:
        """Name the cause of torch's own error about shapes, in a class without a reviewed layout."""
        try:
            return proceed(arguments)
        except RuntimeError as error:
            if not str(error).startswith("The size of tensor"):
                raise
            what = f"tensor={self.context.config.tensor} cannot run {name}: more than its weights follows the heads"
            raise ConfigError(f"{what} ({error}); use ulysses, or ring with exchange='gather'") from error
