"""Bytes a rank sends in one forward without masks, worked out from shapes: independent of the counters."""

from __future__ import annotations

from typing import Any

from ditmesh.layout.conventions import Size

FLOAT = 4


def split(total: int, parts: int) -> list[int]:
    return [total // parts + (1 if part < total % parts else 0) for part in range(parts)]


def expected_bytes(model: str, config: dict[str, Any], size: Size, rank: int) -> dict[str, int]:
    """Bytes by axis that ``rank`` sends to others in one forward."""
    heads, dim = 8, 16 if model == "Flux" else 8
    image, text = size.rows * size.cols, size.text
    calls = streams_of(model)
    ulysses, ring = config.get("ulysses", 1), config.get("ring", 1)
    world = ulysses * ring
    lengths = {"image": split(image, world), "text": split(text, world)}
    heads_of = split(heads, ulysses)
    ring_rank, ulysses_rank = divmod(rank, ulysses)
    group = range(ring_rank * ulysses, (ring_rank + 1) * ulysses)
    sent = {"ulysses": 0, "ring": 0, "sequence": 0}
    for streams in calls:
        mine = sum(lengths[s][rank] for s in streams)
        for place, peer in enumerate(group):
            if peer != rank:
                theirs = sum(lengths[s][peer] for s in streams)
                # q, k and v of my tokens for the peer's heads; the output of my heads for the peer's tokens
                sent["ulysses"] += 3 * mine * heads_of[place] + theirs * heads_of[ulysses_rank]
        # Every rank passes on all blocks of keys and values but the one after its own; or sends its own to all others.
        for step in range(ring - 1):
            block = ring_rank if config.get("exchange") == "gather" else (ring_rank - step) % ring
            keys = sum(lengths[s][block * ulysses + u] for s in streams for u in range(ulysses))
            sent["ring"] += 2 * keys * heads_of[ulysses_rank]
    for axis in ("ulysses", "ring"):
        sent[axis] *= size.batch * dim * FLOAT
    # The image is gathered once, when its tokens have become patches of the prediction: 2 x 2, of 4 or 8 channels.
    features = 32 if model == "PixArt" else 16
    sent["sequence"] = (world - 1) * size.batch * lengths["image"][rank] * features * FLOAT
    return {axis: count for axis, count in sent.items() if count}


def streams_of(model: str) -> list[tuple[str, ...]]:
    """Streams of every attention call that mixes tokens, in call order over all blocks."""
    return {
        "DiT": [("image",)] * 3,
        "PixArt": [("image",)] * 3,
        "SD3": [("image", "text"), ("image",), ("image", "text"), ("image", "text")],
        "Flux": [("text", "image")] * 4,
    }[model]
