"""The slices of weights for tensor-parallel ranks: only arithmetic, no communication.

Column and row parallel layers after Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053): the first linear of a
pair is cut by output features, the second by input features, and one all-reduce joins them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from torch import nn

from ...core.library import library_name
from ...core.partition import Partition, even_cut
from ...errors import ConfigError, InputError
from ...layout import Table, known_tables
from .rules import ATTRIBUTES, ENCODER_RULES, KEYS, NORMS, QUERIES, SLICE_RULES, Rule

# Shares of a hidden width are multiples of this where possible: matrix kernels are slow on odd widths.
WIDTH_UNIT = 16

SliceKind = Literal["column", "gathered", "row", "norm", "embedding", "table"]


@dataclass(frozen=True)
class Site:
    """One linear (or norm over all heads) that is cut.

    Attributes:
        kind: ``"column"``: output features are cut; ``"gathered"``: the same, and the output is put together again;
            ``"row"``: input features are cut, the output is summed; ``"norm"``: a norm over features that are cut;
            ``"embedding"``: like gathered; ``"table"``: an embedding with a column for each head.
        cut: of its output features, or (row) of its input features.
    """

    path: str
    kind: SliceKind
    cut: Partition

    @property
    def dim(self) -> int:
        """Dimension of the weight that is cut."""
        return 1 if self.kind in ("row", "embedding", "table") else 0

    def dim_of(self, parameter: str) -> int | None:
        """Dimension of ``"weight"`` or ``"bias"`` that is cut; None: the first rank holds it whole, the others zeros.

        That is the bias of a row-parallel linear, which is to be added once.
        """
        return self.dim if parameter == "weight" else None if self.kind == "row" else 0


@dataclass
class TensorPlan:
    """All that changes in a model, worked out before anything does.

    Attributes:
        sites: the layers that are cut, in the model's order.
        attributes: integers of modules that the model's code reads: ``(module path, name, value of every rank)``.
        tables: attention modules with positional tables that follow heads or channels: ``(module path, table, cut)``.
        kept: cuts of the heads of keys and values, by how many all ranks have, and numbers of a head.
        between: names of parameters that are whole and lie between slices: every rank has a part of their gradient.
        unknown: names of those of which that is not known.
    """

    sites: list[Site] = field(default_factory=list)
    attributes: list[tuple[str, str, tuple[int, ...]]] = field(default_factory=list)
    tables: list[tuple[str, Table, Partition]] = field(default_factory=list)
    kept: dict[tuple[int, int], Partition] = field(default_factory=dict)
    between: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def parameters(self) -> Iterator[tuple[str, int | None, Partition | None]]:
        """Every parameter that a rank does not hold whole: its name, `Site.dim_of` it, and the cut if it has one."""
        for site in self.sites:
            for name in ("weight", "bias"):
                dim = site.dim_of(name)
                yield f"{site.path}.{name}", dim, None if dim is None else site.cut


def plan_slices(model: nn.Module, degree: int, rules: Sequence[Rule] = SLICE_RULES) -> TensorPlan:
    """Work out how ``degree`` ranks share a model's weights. A linear that no rule covers stays whole on every rank.

    `ConfigError`: a module has fewer heads than ranks; `InputError`: a linear that should be cut does not hold a plain
    weight (it is quantised, say), or has an unexpected size.
    """
    plan = TensorPlan()
    modules = dict(model.named_modules())
    claimed: set[str] = set()
    blocks = {path: module for path, module in modules.items() if not _inside_adapter(path)}
    # An attention without an output projection may be cut only when its block has one: those blocks come first.
    for rule in rules:
        for path, module in blocks.items():
            if path not in claimed and rule.fits(partial(_linear_at, module), module._modules) and _wired(rule, module):
                _apply(plan, rule, path, module, degree, claimed)
    order = {path: index for index, path in enumerate(modules)}
    plan.sites.sort(key=lambda site: order[site.path])
    return plan


def plan_encoder(model: nn.Module, degree: int) -> TensorPlan:
    """`plan_slices` for a text encoder of transformers, its table of words and its logits among them.

    Where both have one weight it stays whole: one is cut by features, the other by words.
    """
    plan = plan_slices(model, degree, ENCODER_RULES)
    encoder: Any = model
    words, logits = encoder.get_input_embeddings(), encoder.get_output_embeddings()
    if logits is None or logits.weight is not words.weight:
        for path, module in model.named_modules():
            if module is logits and isinstance(module, nn.Linear):
                plan.sites.append(Site(path, "gathered", _hidden_cut(module.out_features, degree)))
            elif isinstance(module, nn.Embedding) and module.weight is words.weight:
                # T5 has the same table twice.
                plan.sites.append(Site(path, "embedding", _hidden_cut(module.embedding_dim, degree)))
    return plan


def _apply(plan: TensorPlan, rule: Rule, path: str, module: nn.Module, degree: int, claimed: set[str]) -> None:
    """Record the slices of a module that a rule fits."""
    claimed.add(path)
    for name in rule.gathered:
        linear = _linear_at(module, name)
        if linear is not None and linear.out_features >= linear.in_features:
            plan.sites.append(Site(_join(path, name), "gathered", _hidden_cut(linear.out_features, degree)))
    if rule.gathered:
        return
    attention_path = _join(path, rule.attention or "")
    attention = None if rule.attention is None else _child(module, rule.attention)
    widths = {} if attention is None else _head_cuts(attention, attention_path, degree)
    _apply_rows(plan, rule, path, module, widths, degree)
    for name, parts in rule.column.items():
        linear = _linear_at(module, name)
        if linear is None:
            continue
        cut = _packed(parts, widths)
        # Gated activations (GEGLU, SwiGLU) read two halves from one projection.
        repeats = max(1, linear.out_features // cut.total) if rule.gated else 1
        cut = Partition(cut.blocks * repeats)
        _expect(path, name, linear.out_features, cut.total, "output", rule)
        plan.sites.append(Site(_join(path, name), "column", cut))
    holders = {path: module}
    if attention is None:
        plan.unknown += _whole_parameters(plan, path, module)
    else:
        _refuse_unknown(rule, module, attention_path, attention, widths["queries"].total)
        _cut_attention(plan, attention_path, attention, widths)
        claimed.add(attention_path)
        for name in _whole_parameters(plan, attention_path, attention):
            normed = name.removeprefix(f"{attention_path}.").split(".")[0] in NORMS
            (plan.between if normed else plan.unknown).append(name)
        holders[attention_path] = attention
    for holder_path, holder in holders.items():
        for name, width in ATTRIBUTES.items():
            value = vars(holder).get(name)
            if width in widths and type(value) is int and value == widths[width].total:
                plan.attributes.append((holder_path, name, widths[width].lengths))


def _apply_rows(
    plan: TensorPlan, rule: Rule, path: str, module: nn.Module, widths: dict[str, Partition], degree: int
) -> None:
    """Record row-split weights, and add widths that only these layers show."""
    for name, parts in rule.row.items():
        linear = _linear_at(module, name)
        if linear is None:
            continue
        missing = [width for width in parts if width not in widths]
        if missing:
            # The input features without the named widths are the hidden width.
            rest = linear.in_features - sum(widths[width].total for width in parts if width in widths)
            widths[missing[0]] = _hidden_cut(rest, degree)
        cut = _packed(parts, widths)
        _expect(path, name, linear.in_features, cut.total, "input", rule)
        plan.sites.append(Site(_join(path, name), "row", cut))


def _refuse_unknown(rule: Rule, module: nn.Module, path: str, attention: nn.Module, queries: int) -> None:
    """Reject an attention with projections of all heads that the rule does not split."""
    known = {id(_linear_at(module, name)) for name in (*rule.column, *rule.row)}
    for name, child in attention.named_modules():
        linear = base_layer_of(child)
        if not isinstance(linear, nn.Linear) or id(linear) in known or _inside_adapter(_join(path, name)):
            continue
        if queries in (linear.out_features, linear.in_features) and "." not in name.removesuffix(".0"):
            raise ConfigError(
                f"tensor parallelism cuts the heads of {path} ({type(attention).__name__}), but has no rule for "
                f"{_join(path, name)}, which has all of them; use ulysses, ring, cfg or data for this model"
            )


def share_cut(model: nn.Module, made: TensorPlan) -> float:
    """The share of the parameters in a model's lists of blocks, from 0 to 1, that a plan cuts."""
    numbers = {
        id(base.weight): base.in_features * base.out_features
        for site in made.sites
        if isinstance(base := base_layer_of(model.get_submodule(site.path)), nn.Linear)
    }
    inside = {id(p): p for blocks in model.modules() if isinstance(blocks, nn.ModuleList) for p in blocks.parameters()}
    cut = sum(number for key, number in numbers.items() if key in inside)
    return cut / max(1, cut + sum(p.numel() for key, p in inside.items() if key not in numbers))


def _whole_parameters(made: TensorPlan, path: str, module: nn.Module) -> list[str]:
    """Names of a module's parameters that are no part of a site."""
    sites = tuple(f"{site.path}." for site in made.sites)
    return [name for name in (_join(path, own) for own, _ in module.named_parameters()) if not name.startswith(sites)]


def _cut_attention(plan: TensorPlan, path: str, attention: nn.Module, widths: dict[str, Partition]) -> None:
    """Note the norms over all heads, and the positional tables, of an attention."""
    for name, width in NORMS.items():
        norm = _child(attention, name)
        if norm is not None and width in widths and norm_width(norm) == widths[width].total:
            if "RMSNorm" not in type(norm).__name__:
                raise InputError(
                    f"{_join(path, name)} ({type(norm).__name__}) averages over all heads; tensor "
                    "parallelism knows RMS norms there only. Use ulysses or ring for this model"
                )
            plan.sites.append(Site(_join(path, name), "norm", widths[width]))
    distances = attention._modules.get("relative_attention_bias")
    if isinstance(distances, nn.Embedding):
        plan.sites.append(Site(_join(path, "relative_attention_bias"), "table", widths["heads"]))
    plan.kept[heads := widths["kv_heads"].total, widths["keys"].total // heads] = widths["kv_heads"]
    for table in known_tables():
        if table.kind == library_name(attention):
            plan.tables.append((path, table, widths[table.width]))


def _wired(rule: Rule, module: nn.Module) -> bool:
    """True if the sizes of a feed-forward's linears are those of one: a chain of three can have the same names."""
    if rule.attention is not None or not rule.row:
        return True
    columns, rows = (
        [linear for name in names if (linear := _linear_at(module, name))] for names in (rule.column, rule.row)
    )
    hidden = {linear.in_features for linear in rows}
    factors = (1, 2) if rule.gated else (1,)
    return (
        len(hidden) == 1
        and len({linear.in_features for linear in columns}) == 1
        and all(linear.out_features in [factor * size for factor in factors for size in hidden] for linear in columns)
    )


def _head_cuts(attention: nn.Module, path: str, degree: int) -> dict[str, Partition]:
    """Cuts of everything that follows the heads; keys and values of a group of queries stay with them."""
    query, key = (
        next((linear for name in names if (linear := _linear_at(attention, name))), None) for names in (QUERIES, KEYS)
    )
    queries = query.out_features if query is not None else vars(attention).get("inner_dim", 0)
    heads = _heads_of(attention, path, queries)
    head_dim = queries // heads
    keys = key.out_features if key is not None else queries
    if head_dim == 0 or queries % heads or keys % head_dim or heads % (keys // head_dim):
        raise InputError(
            f"{path} ({type(attention).__name__}) has {heads} heads, {queries} query and {keys} key channels, which "
            "tensor parallelism cannot read; use ulysses or ring for this model"
        )
    groups = keys // head_dim
    if groups < degree:
        what = "heads" if groups == heads else "key and value heads"
        raise ConfigError(
            f"tensor={degree} is more than the {groups} {what} of {path} ({type(attention).__name__}); use tensor <= "
            f"{groups} and ulysses or ring for the rest"
        )
    share = even_cut(groups, degree)
    per_group = heads // groups
    return {
        "heads": Partition((tuple(n * per_group for n in share),)),
        "kv_heads": Partition((share,)),
        "queries": Partition((tuple(n * per_group * head_dim for n in share),)),
        "keys": Partition((tuple(n * head_dim for n in share),)),
    }


def _heads_of(attention: nn.Module, path: str, queries: int) -> int:
    names = ("heads", "num_heads", "n_heads", "num_attention_heads")
    numbers = [value for name in names if type(value := vars(attention).get(name)) is int]
    if not numbers and type(width := vars(attention).get("head_dim")) is int:
        numbers = [queries // width]
    if not numbers:
        raise InputError(f"{path} ({type(attention).__name__}) does not say how many heads it has")
    return numbers[0]


def _hidden_cut(size: int, degree: int) -> Partition:
    unit = WIDTH_UNIT if size % WIDTH_UNIT == 0 and size // WIDTH_UNIT >= degree else 1
    if size < degree:
        raise ConfigError(f"tensor={degree} ranks cannot share {size} features; use a smaller tensor degree")
    return Partition((tuple(n * unit for n in even_cut(size // unit, degree)),))


def _packed(parts: Sequence[str], widths: dict[str, Partition]) -> Partition:
    return Partition(tuple(block for part in parts for block in widths[part].blocks))


def _expect(path: str, name: str, found: int, expected: int, side: str, rule: Rule) -> None:
    if found != expected:
        raise InputError(
            f"{path}.{name} has {found} {side} features, but the rule {rule.name!r} for tensor parallelism expects "
            f"{expected}; use ulysses or ring for this model"
        )


def base_layer_of(module: nn.Module) -> nn.Module:
    """The layer under any adapters (peft wraps the layer it adapts)."""
    while isinstance(inner := module._modules.get("base_layer"), nn.Module):
        module = inner
    return module


def _inside_adapter(path: str) -> bool:
    return any(part in ("base_layer", "lora_A", "lora_B") for part in path.split("."))


def _child(module: nn.Module, path: str) -> nn.Module | None:
    found: nn.Module | None = module
    for part in path.split(".") if path else ():
        found = found._modules.get(part) if found is not None else None
    return found


def _linear_at(module: nn.Module, path: str) -> nn.Linear | None:
    found = _child(module, path)
    base = None if found is None else base_layer_of(found)
    return base if isinstance(base, nn.Linear) else None


def _join(*parts: str) -> str:
    return ".".join(filter(None, parts))


def norm_width(norm: nn.Module) -> int | None:
    """Number of features a norm averages over, if it says so."""
    for name in ("normalized_shape", "dim"):
        shape = getattr(norm, name, None)
        if isinstance(shape, (tuple, list)) and len(shape) == 1:
            return int(shape[0])
    return None
