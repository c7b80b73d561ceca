"""A transformer's work for one sample as numbers: operations, tokens, widths. No tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

# The cut of a linear by tensor parallelism: see `ditmesh.strategies.tensor.slices`.
Cut = Literal["", "column", "row", "gathered"]


class TokenCount(NamedTuple):
    """So many of them a sample, image token and text token."""

    sample: float = 0.0
    image: float = 0.0
    text: float = 0.0

    def of(self, image: float, text: float) -> float:
        """The number for a sample of so many image and text tokens."""
        return self.sample + self.image * image + self.text * text


NONE = TokenCount()


@dataclass(frozen=True)
class Linear:
    """A product of (rows, inputs) by (inputs, outputs)."""

    rows: TokenCount
    inputs: int
    outputs: int
    cut: Cut = ""
    count: int = 1


@dataclass(frozen=True)
class AttentionWork:
    """Softmax attention of queries over keys; ``local``: all keys are text that every rank has."""

    queries: TokenCount
    keys: TokenCount
    heads: int
    width: int
    local: bool = False
    count: int = 1


@dataclass(frozen=True)
class Pointwise:
    """Everything else: elements read and written, kernels launched, FLOPs of matrix products without weights.

    ``sliced``: tensor parallelism cuts the features that it works on.
    """

    elements: TokenCount
    kernels: int
    flops: TokenCount = NONE
    sliced: bool = False


Operation = Linear | AttentionWork | Pointwise
# As the works that ship call them.
OPERATION_NAMES: dict[type, str] = {Linear: "Linear", AttentionWork: "Attention", Pointwise: "Pointwise"}


@dataclass(frozen=True)
class BlockWork:
    """A kind of block: those of one list with weights of one shape.

    Attributes:
        operations: in no order.
        parameters: of one block.
        sliced: of these, how many tensor parallelism shares out.
        width: features of a token between blocks.
        text: whether its text is a stream that ranks share out, and not a constant.
        whole_text: whether it is a stream that every rank has whole, whatever the text policy.
        norms: how many norms are over features that tensor parallelism shares out, which then add up over ranks.
    """

    name: str
    count: int
    operations: tuple[Operation, ...]
    parameters: int
    sliced: int = 0
    width: int = 0
    text: bool = False
    whole_text: bool = False
    norms: int = 0


@dataclass(frozen=True)
class Gather:
    """A stream of tokens that sequence ranks have each their own of, and all of them behind a list of blocks.

    Attributes:
        text: whether it is the text's, which every rank may have whole anyway.
        tokens: elements that the blocks return.
        results: of token-local operations before the model needs all tokens.
    """

    text: bool
    tokens: TokenCount
    results: TokenCount


@dataclass(frozen=True)
class Work:
    """A transformer's work.

    Attributes:
        model: name of its class.
        blocks: kinds of blocks.
        order: kind of every block, in the order in which they run.
        rest: what runs before and behind the blocks.
        heads: the smallest number of heads.
        output: elements of the prediction.
        gathers: what sequence ranks gather behind lists of blocks.
        buffers: elements of tables that every rank holds beside the parameters.
        outside: parameters of large layers outside of blocks, which `shard` shares out too.
        outside_layers: how many such layers there are.
    """

    model: str
    blocks: tuple[BlockWork, ...]
    order: tuple[int, ...]
    rest: BlockWork
    heads: int
    output: TokenCount
    gathers: tuple[Gather, ...]
    buffers: int = 0
    outside: int = 0
    outside_layers: int = 0

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole transformer."""
        return self.rest.parameters + sum(block.parameters * block.count for block in self.blocks)

    def flops(self, image: float, text: float) -> float:
        """Floating-point operations of one sample, as torch's counter counts them."""
        return sum(
            block.count * sum(_flops(one, image, text) for one in block.operations)
            for block in (*self.blocks, self.rest)
        )

    def everything(self) -> Iterator[BlockWork]:
        """All kinds of blocks, and the rest."""
        yield from self.blocks
        yield self.rest


def _flops(one: Operation, image: float, text: float) -> float:
    if isinstance(one, Linear):
        return 2 * one.count * one.rows.of(image, text) * one.inputs * one.outputs
    if isinstance(one, AttentionWork):
        queries, keys = one.queries.of(image, text), one.keys.of(image, text)
        return 4 * one.count * queries * keys * one.heads * one.width
    return one.flops.of(image, text)


@dataclass(frozen=True)
class Workload:
    """The sizes of a request, as every prediction of seconds and of bytes reads them.

    Attributes:
        rows, cols, frames: image tokens of a sample along height, width and time.
        text: text tokens of a sample.
        pictures: made at once.
        branches: of guidance; 1 without.
        batched: whether they are rows of one call of the transformer; else each has a call of its own.
        element: bytes of an element of the weights.
        width, height: in pixels; 0 where only tokens are known, which do not say what decoding takes.
        latent_frames: that the autoencoder decodes; 0: as many as there are tokens along time.
    """

    rows: int
    cols: int
    frames: int = 1
    text: int = 256
    pictures: int = 1
    branches: int = 1
    batched: bool = True
    steps: int = 28
    element: int = 2
    width: int = 0
    height: int = 0
    latent_frames: int = 0

    @classmethod
    def of_tokens(cls, image: int, text: int, **sizes: Any) -> Workload:
        """A workload with a known number of image tokens and an unknown grid."""
        return cls(1, image, text=text, **sizes)

    @property
    def image(self) -> int:
        """Image tokens of a sample."""
        return self.rows * self.cols * self.frames

    def calls(self, pictures: int, branches: int) -> tuple[int, int]:
        """Rows per call, and calls per step, for a number of images with several branches each."""
        return (pictures * branches, 1) if self.batched else (pictures, branches)


def as_data(work: Work) -> dict[str, Any]:
    """The work as plain data, for JSON."""
    data = asdict(work)
    for block, made in zip(work.everything(), [*data["blocks"], data["rest"]], strict=True):
        for one, entry in zip(block.operations, made["operations"], strict=True):
            entry["kind"] = OPERATION_NAMES[type(one)]
    return data


def from_data(data: dict[str, Any]) -> Work:
    """The inverse of `as_data`."""
    kinds = {name: kind for kind, name in OPERATION_NAMES.items()}

    def tokens(entry: dict[str, Any]) -> dict[str, Any]:
        return {key: TokenCount(*value) if isinstance(value, list) else value for key, value in entry.items()}

    def block(entry: dict[str, Any]) -> BlockWork:
        entry = dict(entry)
        made = []
        for one in entry.pop("operations"):
            one = dict(one)
            made.append(kinds[one.pop("kind")](**tokens(one)))
        return BlockWork(operations=tuple(made), **tokens(entry))

    return Work(
        data["model"],
        tuple(map(block, data["blocks"])),
        tuple(data["order"]),
        block(data["rest"]),
        data["heads"],
        TokenCount(*data["output"]),
        tuple(Gather(**tokens(one)) for one in data["gathers"]),
        data["buffers"],
        data["outside"],
        data["outside_layers"],
    )
