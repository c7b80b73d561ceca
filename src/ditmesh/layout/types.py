"""The token layout of a transformer class as data: which tensors hold which tokens.

A diffusers DiT runs `prologue -> list(s) of blocks -> epilogue`. Inside the blocks everything is token-local but
attention: a strategy needs to know which arguments of a block carry which tokens, and which attention calls mix them.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

# The kind of an argument, as far as a model may treat it otherwise (`ditmesh.layout.forms.argument_kind`).
ArgumentKind = Hashable
# Name and kind of every argument of one call of a transformer.
CallForm = frozenset[tuple[str, ArgumentKind]]


@dataclass(frozen=True)
class Stream:
    """A tensor of tokens that every block of a region takes and returns.

    Attributes:
        name: what its tokens are called in the rest of the layout: ``"image"``, ``"text"`` …
        arg: the block's argument, ``"hidden_states"``.
        out: position in the tuple the block returns; None when the block returns this tensor alone.
        dim: token dimension, 1 for (B, S, C).
        used_after: whether the model reads this stream after the region's last block; else it is not gathered.
        replicate: every rank holds all its tokens: the block picks some by their position (Mochi's valid text tokens).
        folded: the token dimension also holds the batch, tokens running fastest: ``dim=0`` of (B·S, F, C).
        returned: False for tokens that are attended to and do not come back: every rank holds them whole.
    """

    name: str
    arg: str
    out: int | None = None
    dim: int = 1
    used_after: bool = True
    replicate: bool = False
    folded: bool = False
    returned: bool = True


def image_and_text(image: int, text_used_after: bool = True) -> tuple[Stream, Stream]:
    """Streams of a block that returns a pair of them, the image at place ``image`` (0 or 1)."""
    return (
        Stream("image", "hidden_states", out=image),
        Stream("text", "encoder_hidden_states", out=1 - image, used_after=text_used_after),
    )


@dataclass(frozen=True)
class Cut:
    """A tensor argument that has one entry per token and arrives whole in every block.

    Attributes:
        arg: path of the argument; parts after a dot index into tuples and dicts: ``"image_rotary_emb.0"``.
        dim: token dimension; negative counts from the end.
        tokens: the streams it covers, in order: ``("text", "image")``.
        ndim: the cut applies only to tensors of that many dimensions, 4 for modulation that is (B, 6, C), or
            (B, S, 6, C) with a timestep per token; None: to any. An argument may have several cuts.
        folded: the dimension also holds the batch, tokens running fastest: (B·S, C).
    """

    arg: str
    dim: int
    tokens: tuple[str, ...] = ("image",)
    ndim: int | None = None
    folded: bool = False


def rotary(arg: str, dim: int, tokens: tuple[str, ...] = ("image",), ndim: int | None = None) -> tuple[Cut, Cut]:
    """Cuts of a rotary table that comes as a pair (cosines, sines); arguments as in `Cut`."""
    return Cut(f"{arg}.0", dim, tokens, ndim), Cut(f"{arg}.1", dim, tokens, ndim)


@dataclass(frozen=True)
class Count:
    """An integer argument that counts tokens of a stream: a rank gets the number of those that are its own.

    ``part``: the ``"first"`` so many (those of the first frame), the ``"last"`` (those behind a film's history), or
    ``"all"``; then another number is refused.
    """

    arg: str
    stream: str
    part: Literal["first", "last", "all"] = "first"


@dataclass(frozen=True)
class Fold:
    """An argument that has its tokens along several dimensions, or entries that are for several tokens each.

    To everything but the blocks it has one dimension with an entry per token (`ditmesh.layout.folds`).

    Attributes:
        arg: path of the argument.
        dim: the first of the dimensions, which becomes that of the tokens.
        axes: how many dimensions there are, the last running fastest; 1: each entry is for as many successive tokens.
        results: positions of the block's results that are these tokens.
    """

    arg: str
    dim: int
    axes: int
    results: tuple[int, ...] = ()


@dataclass(frozen=True)
class Grid:
    """The image as a grid that blocks unfold, split between rows only: names of the arguments with its size."""

    rows: str
    cols: str


@dataclass(frozen=True)
class Leaf:
    """A module inside every block that mixes tokens without attention, and the rule for distributing it.

    Attributes:
        module: its path in the block, ``"ff.conv_depth"``.
        rule: of `ditmesh.strategies.token_mixers`: ``"conv_rows"`` (convolution over a grid that is cut between rows),
            ``"linear_attention"`` (through a state summed over all tokens), ``"gathered"`` (on all tokens),
            ``"heads"`` (attention on all tokens with some heads: it keeps keys and values, or masks them its own way).
        processor: class of the attention processor that the rule stands in for; a module with another one is refused.
        args, dim: of ``"gathered"`` and ``"heads"``: arguments with tokens, each with its dimension; the result's.
        stream: the stream that the tokens belong to; ``streams``: of ``"heads"``, that of each of ``args``.
    """

    module: str
    rule: str
    processor: str = ""
    args: tuple[tuple[str, int], ...] = ()
    dim: int = 1
    stream: str = "image"
    streams: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """A positional table that tensor parallelism splits: one per channel or head, applied inside the attention.

    Attributes:
        kind, argument: class of the attention module, and its argument: a tensor or a tuple of tensors.
        ndim, dim: number of dimensions of the tensors meant, and the one that follows ``width``.
        width: ``"queries"`` (channels) or ``"heads"``, as in `ditmesh.strategies.tensor.rules.Rule`.
    """

    kind: str
    argument: str
    ndim: int
    dim: int
    width: str


@dataclass(frozen=True)
class Attention:
    """One attention call of a block that mixes tokens across ranks.

    Attributes:
        queries, keys: streams of the tokens that ask, and that answer, in the order one device has them.
        ragged: a replicated stream of which only some tokens take part: ``"text"`` when the block leaves padding out.
        per_sample: the block makes this call once for every sample of the batch. Only for its last entry.
        unless, only_if: arguments of the block: it leaves this call out when the first is true, or the second false.
    """

    queries: tuple[str, ...]
    keys: tuple[str, ...]
    ragged: str | None = None
    per_sample: bool = False
    unless: str | None = None
    only_if: str | None = None


def joint(*tokens: str) -> Attention:
    """Attention of these streams, in this order, with themselves."""
    return Attention(queries=tokens, keys=tokens)


# An attention call that needs no other rank's tokens: image queries on text that every rank has whole.
LOCAL = Attention(queries=(), keys=())


@dataclass(frozen=True)
class Region:
    """One list of blocks.

    Attributes:
        blocks: path of the `ModuleList` in the transformer.
        streams: tensors that enter as arguments and leave as results of every block; the first is the main one.
        attention: the block's attention calls in the order they happen; a block may make only the first few.
        cuts, counts: arguments with an entry per token, and integers that count tokens.
        whole: arguments that are the same for all tokens, or wanted whole (modulation, cross-attended text and its
            mask). Paths as in `Cut.arg`; a name covers everything below it.
        local: arguments that hold this rank's tokens already, as an earlier block of the list made them: ``("skip",)``.
        grid, leaves: how blocks mix tokens without attention.
        chained: the streams come from the region before as its last block returned them: nothing is gathered between.
        known: tensor and integer arguments of the blocks that were seen, as (path, class, number of dimensions); any
            other is refused. Empty for a layout that was written: its paths alone are compared.
        alone: the model wants all tokens between these blocks: they are gathered behind every block, and cut again.
        written: arguments with tokens that the blocks write to; a block that runs several times for a call gets copies.
        folds: arguments to be folded, the main stream first; the region's other entries are of them as they are then.
    """

    blocks: str
    streams: tuple[Stream, ...] = (Stream("image", "hidden_states"),)
    attention: tuple[Attention, ...] = (joint("image"),)
    cuts: tuple[Cut, ...] = ()
    whole: tuple[str, ...] = ()
    chained: bool = False
    local: tuple[str, ...] = ()
    counts: tuple[Count, ...] = ()
    grid: Grid | None = None
    leaves: tuple[Leaf, ...] = ()
    known: tuple[tuple[str, str, int], ...] = ()
    alone: bool = False
    written: tuple[str, ...] = ()
    folds: tuple[Fold, ...] = ()

    @property
    def main(self) -> Stream:
        """The first stream: the image; its tokens decide how many ranks can share the work."""
        return self.streams[0]


# The reason why a layout refuses an argument, where several do.
CONTROLNET = "ControlNet residuals are added between blocks to whole sequences"
IP_ADAPTER = "IP-Adapter attention is not in the layout"

# The source of a layout that a user hands over.
GIVEN = "given"


@dataclass(frozen=True)
class TokenLayout:
    """The positions of one transformer class's tokens in its blocks' tensors.

    Attributes:
        model: name of the transformer class.
        regions: its block lists, in the order they run.
        refused: arguments of the forward that this layout does not cover, each with the reason: the layout of a call
            that sets one is derived.
        unbatched: paths of tensor arguments of the forward with another first dimension than the batch (``"img_ids"``).
            Every other tensor with dimensions has an entry per sample in its first.
        batched: those with samples along another dimension, as (path, dimension): embeddings with a row per layer.
        grouped: those that may have several entries per sample, one sample's behind the other's: the embeddings of a
            film's first and last frame.
        listed: arguments that are Python lists with one item per sample: ``("x", "cap_feats")``.
        alternating: the lists run by turns (block 0 of each, block 1 …), and tokens stay cut from first to last.
        kept: paths of modules inside blocks that the model also calls outside of them: every stage of PipeFusion keeps
            their weights.
        tables: positional tables that tensor parallelism cuts with the heads.
        residuals: arguments of the forward that it adds to tokens between blocks, a tensor or a list of them: a
            ControlNet's. Each with the path of the (first) block list of these tokens.
        between: arguments that the model uses between blocks on all tokens: in a call that sets one the tokens are
            gathered behind every block (`Region.alone`).
        rows: whether the samples of a call can be run apart; else `data` and `cfg` refuse it.
        calls: forms of call that the layout was derived from, each as sorted (name, kind); another form is looked at
            when it comes. Empty for a layout that was written: it holds for every call.
        source: ``"reviewed"``: of the table that ships; ``"probed"``: derived from inputs that a probe made up;
            ``"derived"``: from a real call; ``"given"``: handed over, and compared with one device when it is used.
    """

    model: str
    regions: tuple[Region, ...]
    refused: dict[str, str] = field(default_factory=dict)
    unbatched: tuple[str, ...] = ()
    batched: tuple[tuple[str, int], ...] = ()
    grouped: tuple[str, ...] = ()
    listed: tuple[str, ...] = ()
    alternating: bool = False
    kept: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    residuals: tuple[tuple[str, Cut], ...] = ()
    between: tuple[str, ...] = ()
    rows: bool = True
    calls: tuple[tuple[tuple[str, ArgumentKind], ...], ...] = ()
    source: str = "reviewed"
