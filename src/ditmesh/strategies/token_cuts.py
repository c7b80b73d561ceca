"""How the tokens of a model's streams are cut into runs, one for each sequence rank."""

from __future__ import annotations

from torch import Tensor

from ..config import ParallelConfig
from ..core.arguments import Arguments
from ..core.group import Group
from ..core.partition import Partition, weighted_cut
from ..errors import ConfigError, LayoutError
from ..layout import Count, Grid, Region, Stream
from .balance import Balance
from .hooks import BlockSite

# A rank's share of a text stream below this is not worth cutting: its matrices get too thin.
MIN_TEXT_TOKENS = 4
# A long sequence is cut between multiples of this many tokens: kernels like it, and their edges stay the same.
UNIT = 16


class TokenCut:
    """The runs of tokens that the sequence ranks of a link have, by their speeds and the policy for text."""

    def __init__(self, config: ParallelConfig, link: Group, balance: Balance) -> None:
        self.config, self.link, self.balance = config, link, balance

    def main(self, region: Region, tokens: int) -> tuple[int, ...]:
        """Tokens of the image on every rank, before any block has run."""
        if region.grid is not None:
            raise LayoutError(
                "what is added to the tokens between blocks cannot be cut where blocks unfold them into rows; leave "
                "it out"
            )
        return self._shares(tokens)

    def lay_out(self, site: BlockSite, streams: list[Stream], arguments: Arguments) -> Partition:
        """The number of the streams' tokens on every rank."""
        return Partition.beside([self.partition(site, stream, arguments) for stream in streams])

    def partition(self, site: BlockSite, stream: Stream, arguments: Arguments) -> Partition:
        """The number of one stream's tokens on every rank."""
        tokens, ranks = arguments.get(stream.arg).shape[stream.dim], self.link.size
        if stream is site.region.main:
            if tokens < ranks:
                raise ConfigError(
                    f"{tokens} {stream.name} tokens cannot be shared by {ranks} ranks; use at most {tokens} ranks "
                    "or a larger image"
                )
            if site.region.grid is None:
                return shared(stream, self._shares(tokens))
            rows, cols = self.grid(site, site.region.grid, arguments, tokens)
            if rows < ranks:
                raise ConfigError(
                    f"{rows} rows of image tokens cannot be shared by {ranks} ranks; {site.model} is cut between rows: "
                    f"use at most {rows} ranks or a taller image"
                )
            return shared(stream, tuple(count * cols for count in weighted_cut(rows, self.balance.speeds)))
        policy = self.config.text
        short = policy == "auto" and tokens < MIN_TEXT_TOKENS * ranks
        whole = stream.name == "text" and (policy == "replicate" or short)
        # No rank is left without text: some models slice it off with `[:, :-length]`, and -0 takes everything.
        if whole or stream.replicate or tokens < ranks:
            return replicated(stream, tokens, ranks) if ranks > 1 else shared(stream, (tokens,))
        return shared(stream, self._shares(tokens))

    def _shares(self, tokens: int) -> tuple[int, ...]:
        """Tokens of every sequence rank, by weight."""
        weights = self.balance.speeds
        even = len(set(weights)) == 1
        return weighted_cut(tokens, weights, 1 if even or tokens < 4 * UNIT * len(weights) else UNIT)

    def grid(self, site: BlockSite, grid: Grid, arguments: Arguments, tokens: int) -> tuple[int, int]:
        """Rows and columns of the image's tokens."""
        rows, cols = arguments.get(grid.rows), arguments.get(grid.cols)
        if not isinstance(rows, int) or not isinstance(cols, int) or rows * cols != tokens:
            raise LayoutError(
                f"{site.path}: {grid.rows}={rows} rows of {grid.cols}={cols} are not the {tokens} tokens of the image"
            )
        return rows, cols


def shared(stream: Stream, lengths: tuple[int, ...]) -> Partition:
    """The partition of a stream into one run for each rank (or tile)."""
    return Partition((lengths,), names=(stream.name,))


def replicated(stream: Stream, tokens: int, parts: int) -> Partition:
    """The partition of a stream that every rank (or tile) holds whole."""
    return Partition(((tokens,) * parts,), frozenset((0,)), (stream.name,))


def only(tokens: Partition, ragged: str, tensor: Tensor, held: Partition, part: int) -> Partition:
    """The streams of a call in which only some tokens of the replicated stream ``ragged`` take part.

    How many they are is what ``tensor`` (B, H, s, D) of one part has beyond the other streams of ``held``.
    """
    if ragged not in held.names:
        return tokens
    others = held.lengths[part] - held.sizes(part)[held.names.index(ragged)]
    return tokens.resized(ragged, tensor.shape[2] - others)


def tokens_of_part(counted: Count, number: int, tokens: Partition, part: int) -> int:
    """The number of tokens that a part holds, of the ``number`` tokens of a stream that an argument counts."""
    if tokens.replicated:
        return number
    if counted.part == "last":
        return tokens.lengths[part] - tokens.first(tokens.total - number, part)
    return tokens.first(number, part)
