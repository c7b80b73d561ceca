"""How tensor parallelism cuts each kind of module: data, keyed by the attributes a module has.

A width is a number of features that is shared out in one way everywhere in a module: ``queries`` and ``keys``
(channels, by whole heads), ``heads`` and ``kv_heads`` (one per head), ``hidden`` (a feed-forward's inner
features). A packed projection lists its widths in the order they lie in.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rule:
    """The cuts of one kind of module.

    Attributes:
        name: for messages.
        needs: paths of linears a module must have for the rule to apply; with ``|`` one of several.
        lacks: paths of linears it must not have.
        beside: names of children of any kind, one of which it must have (none: no condition).
        column: path of a linear -> widths of its output features.
        row: path of a linear -> widths of its input features.
        gathered: paths of linears that are cut by output features and put together again behind; those that
            narrow their input (a model's last projection) stay whole.
        attention: path of the attention whose heads are meant (``""``: the module itself).
        gated: a column linear may hold its widths twice, for a value and its gate.
    """

    name: str
    needs: tuple[str, ...]
    column: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    row: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gathered: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    attention: str | None = None
    gated: bool = False

    def fits(self, linears: Callable[[str], bool], children: Container[str]) -> bool:
        """Whether a module is of this kind, given which linears and children it has."""
        return (
            all(any(linears(path) for path in need.split("|")) for need in self.needs)
            and not any(linears(path) for path in self.lacks)
            and (not self.beside or any(name in children for name in self.beside))
        )


_PROJECTIONS = {
    "to_q": ("queries",),
    "to_k": ("keys",),
    "to_v": ("keys",),
    "add_q_proj": ("queries",),
    "add_k_proj": ("keys",),
    "add_v_proj": ("keys",),
    "q_img": ("queries",),
    "k_img": ("keys",),
    "v_img": ("keys",),
    # Fused by fuse_qkv_projections().
    "to_qkv": ("queries", "keys", "keys"),
    "to_kv": ("keys", "keys"),
    "to_added_qkv": ("queries", "keys", "keys"),
    # Gates on the attention's output: one per channel, or one per head.
    "to_gate": ("queries",),
    "to_gate_logits": ("heads",),
}

# In this order: what a rule has taken, later ones leave alone.
RULES: tuple[Rule, ...] = (
    # Attention and feed-forward side by side; one projection reads [attention, hidden].
    Rule(
        name="parallel block",
        needs=("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp", "proj_out"),
        column={"proj_mlp": ("hidden",), **{f"attn.{name}": widths for name, widths in _PROJECTIONS.items()}},
        row={"proj_out": ("queries", "hidden")},
        lacks=("attn.to_out", "attn.to_out.0"),
        attention="attn",
        gated=True,
    ),
    # The same with everything packed into the attention, and a gated hidden part.
    Rule(
        name="packed parallel attention",
        needs=("to_qkv_mlp_proj", "to_out"),
        column={"to_qkv_mlp_proj": ("queries", "keys", "keys", "hidden", "hidden")},
        row={"to_out": ("queries", "hidden")},
        attention="",
    ),
    Rule(
        name="attention",
        needs=("to_q", "to_k", "to_v", "to_out.0|to_out"),
        column=_PROJECTIONS,
        row={"to_out.0": ("queries",), "to_out": ("queries",), "to_add_out": ("queries",)},
        attention="",
    ),
    Rule(
        name="feed-forward",
        needs=("net.0.proj", "net.2"),
        column={"net.0.proj": ("hidden",)},
        row={"net.2": ("hidden",)},
        gated=True,
    ),
    Rule(
        name="feed-forward linear_in",
        needs=("linear_in", "linear_out"),
        column={"linear_in": ("hidden",)},
        row={"linear_out": ("hidden",)},
        gated=True,
    ),
    Rule(
        name="gated feed-forward linear_1..3",
        needs=("linear_1", "linear_2", "linear_3"),
        # Text projections are chains of three linears with these names.
        beside=("silu",),
        column={"linear_1": ("hidden",), "linear_3": ("hidden",)},
        row={"linear_2": ("hidden",)},
    ),
    Rule(
        name="gated feed-forward out_projection",
        needs=("linear_1", "linear_2", "out_projection"),
        column={"linear_1": ("hidden",), "linear_2": ("hidden",)},
        row={"out_projection": ("hidden",)},
    ),
    Rule(
        name="gated feed-forward w1..w3",
        needs=("w1", "w2", "w3"),
        column={"w1": ("hidden",), "w3": ("hidden",)},
        row={"w2": ("hidden",)},
    ),
    Rule(
        name="gated feed-forward up",
        needs=("gate", "up", "down"),
        column={"gate": ("hidden",), "up": ("hidden",)},
        row={"down": ("hidden",)},
    ),
    Rule(
        name="gated feed-forward gate_layer",
        needs=("proj", "gate_layer", "out"),
        column={"proj": ("hidden",), "gate_layer": ("hidden",)},
        row={"out": ("hidden",)},
    ),
    # A timestep's embedder; DiT has one in every block.
    Rule(
        name="embedder",
        needs=("linear_1", "linear_2"),
        lacks=("linear_3", "out_projection"),
        beside=("act",),
        column={"linear_1": ("hidden",)},
        row={"linear_2": ("hidden",)},
    ),
    # Modulation: up to 40 % of a model's weights, applied to one vector per picture. Cut by output features and
    # gathered, since gathering a (B, 6 D) vector costs nothing beside the blocks.
    Rule(name="modulation", needs=("linear",), beside=("norm", "act_fn", "nonlinearity"), gathered=("linear",)),
    Rule(
        name="low-rank modulation",
        needs=("linear_1", "linear_2"),
        lacks=("linear_3", "out_projection"),
        beside=("activation",),
        gathered=("linear_2",),
    ),
    Rule(name="modulation of two streams", needs=("img_mod.1", "txt_mod.1"), gathered=("img_mod.1", "txt_mod.1")),
    Rule(name="modulation adaLN_modulation.0", needs=("adaLN_modulation.0",), gathered=("adaLN_modulation.0",)),
    Rule(name="modulation adaLN_modulation.1", needs=("adaLN_modulation.1",), gathered=("adaLN_modulation.1",)),
)

# Norms inside an attention; cut only when they average over all heads together.
NORMS: Mapping[str, str] = {
    "norm_q": "queries",
    "norm_k": "keys",
    "norm_added_q": "queries",
    "norm_added_k": "keys",
}

# Integers that attention processors read from their module.
ATTRIBUTES: Mapping[str, str] = {
    "heads": "heads",
    "num_heads": "heads",
    "n_heads": "heads",
    "num_attention_heads": "heads",
    "kv_heads": "kv_heads",
    "num_kv_heads": "kv_heads",
    "n_kv_heads": "kv_heads",
    "num_key_value_heads": "kv_heads",
    "inner_dim": "queries",
    "inner_kv_dim": "keys",
    "kv_inner_dim": "keys",
    "out_dim": "queries",
    "mlp_hidden_dim": "hidden",
}
