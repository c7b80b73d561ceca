"""Rules by which tensor parallelism cuts modules: data, keyed by the attributes a module has.

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
        needs: paths of linears a module must have for the rule to apply; with ``|`` one of several.
        lacks: paths of linears it must not have.
        beside: names of children of any kind, one of which it must have (none: no condition).
        column: path of a linear -> widths of its output features.
        row: path of a linear -> widths of its input features.
        gathered: paths of linears that are cut by output features and put together again behind; those that narrow
            their input (a model's last projection) stay whole.
        attention: path of the attention that has the heads (``""``: the module itself).
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

    def fits(self, linear: Callable[[str], object | None], children: Container[str]) -> bool:
        """True if a module is of this kind, given its linear at a path, if there is one, and its children's names."""
        return (
            all(any(linear(path) for path in need.split("|")) for need in self.needs)
            and not any(linear(path) for path in self.lacks)
            and (not self.beside or any(name in children for name in self.beside))
        )


def _feed_forward(
    name: str,
    column: tuple[str, ...],
    row: str,
    lacks: tuple[str, ...] = (),
    beside: tuple[str, ...] = (),
    gated: bool = False,
) -> Rule:
    """The rule of a feed-forward: linears into the inner features, and the one out of them."""
    hidden = ("hidden",)
    return Rule(name, (*column, row), dict.fromkeys(column, hidden), {row: hidden}, (), lacks, beside, None, gated)


# Projections that fuse_qkv_projections() makes.
FUSED = ("to_qkv", "to_added_qkv")

_PROJECTIONS = {
    # Gates on the attention's output: one per channel (to_gate), or one per head.
    **dict.fromkeys(("to_q", "add_q_proj", "q_img", "to_gate"), ("queries",)),
    **dict.fromkeys(("to_k", "to_v", "add_k_proj", "add_v_proj", "k_img", "v_img"), ("keys",)),
    "to_gate_logits": ("heads",),
    **dict.fromkeys(FUSED, ("queries", "keys", "keys")),
    "to_kv": ("keys", "keys"),
}

# Ordered: later rules skip the modules of earlier ones.
SLICE_RULES: tuple[Rule, ...] = (
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
    _feed_forward("feed-forward", ("net.0.proj",), "net.2", gated=True),
    _feed_forward("feed-forward linear_in", ("linear_in",), "linear_out", gated=True),
    # Text projections are chains of three linears with these names.
    _feed_forward("gated feed-forward linear_1..3", ("linear_1", "linear_3"), "linear_2", beside=("silu",)),
    _feed_forward("gated feed-forward out_projection", ("linear_1", "linear_2"), "out_projection"),
    _feed_forward("gated feed-forward w1..w3", ("w1", "w3"), "w2"),
    _feed_forward("gated feed-forward up", ("gate", "up"), "down"),
    _feed_forward("gated feed-forward gate_layer", ("proj", "gate_layer"), "out"),
    # A timestep's embedder; DiT has one in every block.
    _feed_forward("embedder", ("linear_1",), "linear_2", lacks=("linear_3", "out_projection"), beside=("act",)),
    # Modulation: up to 40 % of a model's weights, applied to one vector per image. Cut by output features and
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
    Rule(name="modulation adaln_proj", needs=("adaln_proj.linear",), gathered=("adaln_proj.linear",)),
)

# Of the text encoders of transformers: Llama, Qwen, Mistral, Gemma, CLIP; T5. An embedding that is looked up by the
# distance of two tokens has a column for each head.
ENCODER_RULES: tuple[Rule, ...] = (
    Rule(
        name="attention of a text encoder",
        needs=("q_proj", "k_proj", "v_proj", "o_proj|out_proj"),
        column={"q_proj": ("queries",), "k_proj": ("keys",), "v_proj": ("keys",)},
        row={"o_proj": ("queries",), "out_proj": ("queries",)},
        attention="",
    ),
    Rule(
        name="attention of T5",
        needs=("q", "k", "v", "o"),
        column={"q": ("queries",), "k": ("keys",), "v": ("keys",)},
        row={"o": ("queries",)},
        attention="",
    ),
    _feed_forward("gated feed-forward gate_proj", ("gate_proj", "up_proj"), "down_proj"),
    Rule(
        name="feed-forward gate_up_proj",
        needs=("gate_up_proj", "down_proj"),
        column={"gate_up_proj": ("hidden", "hidden")},
        row={"down_proj": ("hidden",)},
        gated=True,
    ),
    _feed_forward("feed-forward fc1", ("fc1",), "fc2"),
    _feed_forward("gated feed-forward wi_0", ("wi_0", "wi_1"), "wo"),
    _feed_forward("feed-forward wi", ("wi",), "wo"),
)

# Names of projections to queries and to keys.
QUERIES, KEYS = ("to_q", "q_proj", "q"), ("to_k", "k_proj", "k")

# Norms inside an attention; cut only when they average over all heads together.
NORMS: Mapping[str, str] = {
    "norm_q": "queries",
    "norm_k": "keys",
    "norm_added_q": "queries",
    "norm_added_k": "keys",
}

# Integers that attention processors read from their module.
ATTRIBUTES: Mapping[str, str] = {
    **dict.fromkeys(("heads", "num_heads", "n_heads", "num_attention_heads"), "heads"),
    **dict.fromkeys(("kv_heads", "num_kv_heads", "n_kv_heads", "num_key_value_heads"), "kv_heads"),
    **dict.fromkeys(("inner_dim", "out_dim"), "queries"),
    **dict.fromkeys(("inner_kv_dim", "kv_inner_dim"), "keys"),
    "mlp_hidden_dim": "hidden",
}
