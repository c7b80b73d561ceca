"""Tensor parallelism: every rank holds a slice of the weights and all of the tokens.

After Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053): attention is cut by whole heads and feed-forwards by
inner features, so that a pair of linears needs one all-reduce and no other exchange. Weights are plain local
tensors, so adapters, other axes and every backend work as they do on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...comm import Link
from ...config import ParallelConfig
from ...core.arguments import Arguments, covers, parameter_names
from ...core.partition import Partition
from ...errors import InputError
from ...layout import Table, TokenLayout
from ..base import Strategy
from ..heads import check_heads, heads_of
from ..pipefusion.stages import whole_or_refused
from .slices import Plan, Site, base_of, norm_width, plan

# What a rank with slices must not do on its own, and why.
_WHOLE_ONLY = ("save_pretrained", "save_lora_adapter")


class TensorParallel:
    """A transformer whose weights are shared out over the ranks of a link. In place; `close` is the exact inverse.

    LoRA adapters (peft) may be loaded before or after: they are cut like the layers they adapt, at the next call
    of the transformer, and nothing else about them changes.

    Args:
        model: the transformer, with the same weights on every rank, or with this rank's slices as `ditmesh.load`
            leaves them.
        link: the ranks that share the weights.

    Raises:
        ConfigError: a module has fewer heads than the link has ranks.
        InputError: a weight that should be cut is not a plain tensor, or not there (on the meta device).
    """

    def __init__(self, model: nn.Module, link: Link) -> None:
        self.model = model
        self.link = link
        self.plan: Plan = plan(model, link.size)
        self._undo: list[Callable[[], None]] = []
        self._places = [
            (site, model.get_submodule(parent), name)
            for site in self.plan.sites
            if site.kind != "norm"
            for parent, _, name in [site.path.rpartition(".")]
        ]
        # Where a site's epilogue hangs: on the linear, or on the adapter wrapped around it.
        self._epilogues: dict[str, tuple[nn.Module, RemovableHandle]] = {}
        for site in self.plan.sites:
            _check_plain(site, self._base(site))
        self._cut_weights()
        self._set_attributes()
        for site in self.plan.sites:
            if site.kind == "norm":
                norm = self.model.get_submodule(site.path)
                self._replace(norm, "forward", _NormOverRanks(norm, link))
        for path, table, cut in self.plan.tables:
            handle = self.model.get_submodule(path).register_forward_pre_hook(
                _table_slicer(self.model.get_submodule(path), table, cut, link.rank), with_kwargs=True
            )
            self._undo.append(handle.remove)
        self._guard()
        self._follow_adapters()
        # Adapters come and go between calls; looking once a call is cheap and misses none.
        handle = model.register_forward_pre_hook(self._before_call, prepend=True)
        self._undo.append(handle.remove)

    def close(self) -> None:
        """Make the model whole again, bit for bit, adapters included. Collective over the link.

        Raises:
            PeerError: the other ranks' slices did not come. Everything else is undone all the same, and the model
                refuses its next call.
        """
        while self._undo:
            self._undo.pop()()
        for _, handle in self._epilogues.values():
            handle.remove()
        self._epilogues.clear()
        with whole_or_refused(self.model):
            self.gather_adapters()
            with torch.no_grad():
                for site in self.plan.sites:
                    base = self._base(site)
                    for name, parameter in _own_parameters(base):
                        parameter.data = self._whole(parameter.data, site, name)

    # --- weights -----------------------------------------------------------------------------------------

    def _base(self, site: Site) -> nn.Module:
        return base_of(self.model.get_submodule(site.path))

    def _linears(self) -> Iterator[tuple[Site, nn.Module]]:
        """Every linear that is cut, as it is now: adapters wrap it and go away again."""
        for site, parent, name in self._places:
            outer = parent._modules[name]
            assert outer is not None
            yield site, outer

    def _cut_weights(self) -> None:
        rank = self.link.rank
        with torch.no_grad():
            for site in self.plan.sites:
                for name, parameter in _own_parameters(self._base(site)):
                    dim = _dim_of(site, name)
                    if dim is None:
                        # Added once: the other ranks add nothing.
                        if rank > 0:
                            parameter.data = torch.zeros_like(parameter.data)
                    elif parameter.shape[dim] == site.cut.total:
                        parameter.data = site.cut.copy(parameter.data, dim, rank)

    def _whole(self, part: Tensor, site: Site, name: str) -> Tensor:
        """A parameter of a site, or of its adapter, from all ranks' slices."""
        dim = _dim_of(site, name)
        if dim is None:
            return self._of_first(part)
        return self._joined(part, dim, site.cut)

    def _joined(self, part: Tensor, dim: int, cut: Partition) -> Tensor:
        lengths = cut.lengths
        pieces = self.link.all_gather(part.contiguous(), lengths, dim).split(lengths, dim=dim)
        return cut.join(pieces, dim)

    def _of_first(self, part: Tensor) -> Tensor:
        """The first rank's tensor, on every rank."""
        parts = self.link.all_gather(part.contiguous()[None], [1] * self.link.size, 0)
        return parts[0].clone()

    # --- attributes, hooks -------------------------------------------------------------------------------

    def _set_attributes(self) -> None:
        for path, name, values in self.plan.attributes:
            self._replace(self.model.get_submodule(path), name, values[self.link.rank])

    def _replace(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an attribute of the instance, to be undone by `close`."""
        own = vars(module)
        if name in own:
            before = own[name]
            self._undo.append(lambda: own.__setitem__(name, before))
        else:
            self._undo.append(lambda: own.pop(name, None))
        own[name] = value

    def _guard(self) -> None:
        """Methods of the model that need whole weights, or adapters cut like the weights."""
        model = self.model
        for name in _WHOLE_ONLY:
            if hasattr(model, name):
                self._replace(model, name, _refuse_to(name))
        fuse = getattr(model, "fuse_lora", None)
        if callable(fuse):

            def fuse_lora(*args: Any, **kwargs: Any) -> Any:
                # Adapters are added to weights that are cut: they must be cut alike, even before the first call.
                self._follow_adapters()
                return fuse(*args, **kwargs)

            self._replace(model, "fuse_lora", fuse_lora)
        load = getattr(model, "load_lora_adapter", None)
        if callable(load):

            def load_lora_adapter(*args: Any, **kwargs: Any) -> Any:
                # A hot-swap copies into the tensors that are there: they must have their whole size.
                if kwargs.get("hotswap"):
                    self.gather_adapters()
                return load(*args, **kwargs)

            self._replace(model, "load_lora_adapter", load_lora_adapter)

    def _before_call(self, *_: Any) -> None:
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.model.parameters()):
            raise InputError(
                "tensor parallelism is for inference, but gradients are on; call the model under torch.no_grad()"
            )
        self._follow_adapters()

    def _epilogue(self, site: Site) -> Callable[..., Tensor]:
        link, lengths = self.link, site.cut.lengths

        def add_up(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
            return link.all_reduce(output)

        def put_together(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
            return link.all_gather(output.contiguous(), lengths, output.dim() - 1)

        return add_up if site.kind == "row" else put_together

    # --- adapters ----------------------------------------------------------------------------------------

    def _follow_adapters(self) -> None:
        """Cut adapters that are still whole, and hang every epilogue behind base and adapters together."""
        for site, outer in self._linears():
            base = base_of(outer)
            if site.kind != "column":
                self._hang_epilogue(site, outer)
            if outer is not base:
                self._cut_adapters(site, outer)

    def _hang_epilogue(self, site: Site, outer: nn.Module) -> None:
        hung = self._epilogues.get(site.path)
        if hung is not None and hung[0] is outer:
            return
        if hung is not None:
            hung[1].remove()
        self._epilogues[site.path] = (outer, outer.register_forward_hook(self._epilogue(site)))

    def _cut_adapters(self, site: Site, outer: nn.Module) -> None:
        rank = self.link.rank
        with torch.no_grad():
            for parameter, dim, total in _adapter_parameters(site, outer):
                if dim is None:
                    if rank > 0:
                        parameter.data = torch.zeros_like(parameter.data)
                elif parameter.shape[dim] == total:
                    parameter.data = site.cut.copy(parameter.data, dim, rank)

    def spread(self) -> set[int]:
        """Ids of the parameters that are this rank's slices at the moment. Adapters are whole until the next call."""
        found = {id(p) for site in self.plan.sites for _, p in _own_parameters(self._base(site))}
        for site, outer in self._linears():
            if outer is not base_of(outer):
                parameters = _adapter_parameters(site, outer)
                found.update(id(p) for p, dim, total in parameters if dim is None or p.shape[dim] != total)
        return found

    def gather_adapters(self) -> None:
        """Make the adapters whole again; the next call cuts them anew. Collective over the link."""
        with torch.no_grad():
            for site, outer in self._linears():
                if outer is base_of(outer):
                    continue
                for parameter, dim, total in _adapter_parameters(site, outer):
                    if dim is None:
                        parameter.data = self._of_first(parameter.data)
                    elif parameter.shape[dim] != total:
                        parameter.data = self._joined(parameter.data, dim, site.cut)


class _NormOverRanks:
    """RMS norm over features that lie on all ranks, called with this rank's: (..., features of this rank)."""

    def __init__(self, norm: nn.Module, link: Link) -> None:
        width = norm_width(norm)
        assert width is not None
        self.norm = norm
        self.link = link
        self.width = width

    def __call__(self, hidden_states: Tensor) -> Tensor:
        norm = self.norm
        wide = hidden_states.float()
        squares = self.link.all_reduce(wide.square().sum(-1, keepdim=True))
        eps = getattr(norm, "eps", None)
        # torch.nn.RMSNorm's default
        eps = torch.finfo(hidden_states.dtype).eps if eps is None else eps
        out = wide * torch.rsqrt(squares / self.width + eps)
        weight, bias = norm._parameters.get("weight"), norm._parameters.get("bias")
        if weight is None:
            return out.to(hidden_states.dtype)
        if isinstance(norm, nn.RMSNorm):
            return (out * weight).to(hidden_states.dtype)
        # diffusers' RMSNorm rounds before it applies a half-precision weight.
        out = out.to(weight.dtype) * weight
        return out if bias is None else out + bias


def already_cut(model: nn.Module, degree: int) -> set[str]:
    """Names of parameters that hold one rank's slice, as `ditmesh.load` leaves them."""
    found: set[str] = set()
    for site in plan(model, degree).sites:
        base = base_of(model.get_submodule(site.path))
        weight = base._parameters.get("weight")
        if weight is not None and weight.shape[site.dim] != site.cut.total:
            # With the weight its bias is cut too, or zero on all ranks but one.
            found.update(f"{site.path}.{name}" for name, _ in _own_parameters(base))
    return found


def _own_parameters(base: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name in ("weight", "bias"):
        parameter = base._parameters.get(name)
        if parameter is not None:
            yield name, parameter


def _dim_of(site: Site, name: str) -> int | None:
    """The dimension of a parameter that is cut; none: it stays whole on the first rank only."""
    if name == "weight":
        return site.dim
    return None if site.kind == "row" else 0


def _adapter_parameters(site: Site, outer: nn.Module) -> Iterator[tuple[nn.Parameter, int | None, int]]:
    """The parameters of a layer's adapters that follow its cut: parameter, dimension, whole size."""
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
            yield weight, site.dim, site.cut.total
        if bias is not None:
            yield bias, None if site.kind == "row" else 0, site.cut.total


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
    if type(weight.data) is not Tensor or not weight.is_floating_point() or weight.dim() != dimensions:
        raise InputError(
            f"the weight of {site.path} ({type(base).__name__}) is {type(weight).__name__} of {weight.dtype} with "
            f"shape {tuple(weight.shape)}; tensor parallelism cuts plain floating-point weights. Use ulysses or ring "
            "with quantised models"
        )


def _table_slicer(module: nn.Module, table: Table, cut: Partition, rank: int) -> Callable[..., Any]:
    names = parameter_names(type(module).forward)
    start, length = cut.runs(rank)[0][0], cut.lengths[rank]

    def slice_tables(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        arguments = Arguments(names, args, kwargs)
        for path, value in list(arguments.leaves()):
            if not covers(table.argument, path) or not isinstance(value, Tensor) or value.dim() != table.ndim:
                continue
            if value.shape[table.dim] == cut.total:
                arguments.set(path, value.narrow(table.dim, start, length))
        return tuple(arguments.args), arguments.kwargs

    return slice_tables


def _refuse_to(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise InputError(f"{name}() would save this rank's slices only; call ditmesh.restore(...) first")

    return refuse


class TensorSlices(Strategy):
    """Tensor parallelism of every transformer of a pipeline."""

    name = "tensor"

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        """See `Strategy.wanted`."""
        return config.tensor > 1

    @classmethod
    def check(cls, config: ParallelConfig, model: nn.Module, layout: TokenLayout) -> None:
        """See `Strategy.check`."""
        check_heads(config, heads_of(model), type(model).__name__)

    def apply(self, undo: ExitStack) -> None:
        """See `Strategy.apply`."""
        for model in self.context.models:
            undo.callback(model.add(TensorParallel(model.model, self.context.mesh.tensor)).close)
