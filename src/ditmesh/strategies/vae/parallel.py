"""Decoding and encoding in bands: the autoencoder's rows on all ranks, and the whole result on each.

Not the tiled decode, which computes overlapping tiles as if each were an image of its own and blends them: here every
convolution, norm and attention sees what it sees on one device. Modules are neither rewritten nor replaced.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...comm import Link
from ...config import ParallelConfig
from ...core.library import library_name
from ...core.partition import even_cut
from ...core.patching import Patch
from ...errors import UntestedWarning
from ...parts.band import bands_of
from ...parts.banded import Banded, Bands, UncuttableOperation
from ...parts.banded_rules import BAND_RULES, FUNCTION_RULES
from ...parts.part import whole_of
from ..base import Context, Request, Strategy

# Autoencoders that tests have decoded and encoded in bands, against the whole, on 2, 3 and 4 ranks.
TESTED = frozenset(
    [
        "AsymmetricAutoencoderKL",
        "AutoencoderDC",
        "AutoencoderKL",
        "AutoencoderKLCogVideoX",
        "AutoencoderKLCosmos",
        "AutoencoderKLFlux2",
        "AutoencoderKLHunyuanImage",
        "AutoencoderKLHunyuanImageRefiner",
        "AutoencoderKLHunyuanVideo",
        "AutoencoderKLHunyuanVideo15",
        "AutoencoderKLKVAE",
        "AutoencoderKLKVAEVideo",
        "AutoencoderKLLTX2Video",
        "AutoencoderKLLTXVideo",
        "AutoencoderKLMagvit",
        "AutoencoderKLMochi",
        "AutoencoderKLQwenImage",
        "AutoencoderKLQwenImage21",
        "AutoencoderKLTemporalDecoder",
        "AutoencoderKLWan",
        "AutoencoderTiny",
    ]
)

# Minimum rows of latents per rank, and minimum latents of an image, for bands with ``"auto"``.
LEAST_ROWS, LEAST_LATENTS = 16, 64 * 64
# The number of rows of every rank, of latents and of pixels.
_ROWS: dict[str, Callable[[int, int], tuple[int, ...]]] = {"decode": even_cut, "encode": bands_of}
# Pixels in a row of a latent, as most autoencoders have them.
_PIXELS_OF_A_LATENT = 8


def in_bands(bands: Bands, function: Callable[..., Any], rows: tuple[int, ...], *args: Any, **kwargs: Any) -> Any:
    """The result of a function for an image in bands, whole on every rank. Collective.

    The first of its tensors, the same on all ranks, is cut into each rank's ``rows``: (batch, channels, height, width),
    or a video with frames before the height. `UncuttableOperation`: it cannot be computed in bands.
    """
    first, *rest = args
    result = function(bands.cut(first, first.dim() - 2, rows), *rest, **kwargs)
    for leaf in tree_leaves(result):
        if hasattr(leaf, "__dict__") and not isinstance(leaf, Tensor):
            # A distribution of latents is an object that has them as attributes.
            vars(leaf).update({name: whole_of(held) for name, held in vars(leaf).items() if isinstance(held, Banded)})
    result = whole_of(result)
    bands.finish()
    return result


class InBands:
    """An autoencoder's ``decode`` and ``encode`` in bands: collective calls of the ranks of a link.

    ``bands`` knows the operations that were computed on whole tensors for lack of a rule.
    """

    def __init__(self, vae: nn.Module, link: Link) -> None:
        self.bands = Bands(link, BAND_RULES, FUNCTION_RULES)
        # As they are now: those that are patched later call these.
        self.calls: dict[str, Callable[..., Any]] = {name: getattr(vae, name) for name in _ROWS if hasattr(vae, name)}

    def call(self, name: str, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The result of ``decode`` or ``encode`` for latents or pixels (batch, channels, [frames,] height, width)."""
        rows = _ROWS[name](given.shape[-2], self.bands.link.size)
        return in_bands(self.bands, self.calls[name], rows, given, *args, **kwargs)


class BandedVae(Strategy):
    """Runs the VAE of every pipeline in bands during its requests.

    Outside of a request it is as it was: every rank decodes what it is given, which may be its own.
    """

    name = "vae"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._patches = ExitStack()
        # Messages that were logged already.
        self._said: set[str] = set()

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        # In bands the bits would depend on the number of ranks.
        return config.world_size > 1 and config.vae != "whole" and not config.reproducible

    def begin_request(self, request: Request) -> None:
        self._patches.close()
        vae, link = getattr(request.pipe, "vae", None), self.context.mesh.world
        if vae is not None and link.size > 1:
            banded = InBands(vae, link)
            for name in banded.calls:
                self._patches.callback(Patch(vae, name, partial(self._around, vae, name, banded)).undo)

    def end_request(self, failed: bool) -> None:
        self._patches.close()

    def _around(self, vae: nn.Module, name: str, banded: InBands, *args: Any, **kwargs: Any) -> Any:
        original = banded.calls[name]
        if not args:
            return original(*args, **kwargs)
        given = whole_of(args[0])
        reason, tested = _why_whole(vae, given, banded.bands.link), library_name(vae) in TESTED
        if self.context.config.vae == "auto" and (reason or not tested or not self._gains(name, given)):
            return original(*args, **kwargs)
        if reason is None and not tested:
            self._say(
                f"{type(vae).__name__} in bands has not been tested; compare an image with vae='whole' before you "
                "rely on it",
                UntestedWarning,
            )
        if reason is None:
            before = Counter(banded.bands.whole)
            try:
                result = banded.call(name, given, *args[1:], **kwargs)
            except UncuttableOperation as refusal:
                # Raised by the model's operations, so on all ranks alike.
                reason = str(refusal)
            else:
                if without := ", ".join(banded.bands.whole - before):
                    self._say(
                        f"{type(vae).__name__}.{name} computes {without} on the whole image on every rank, for want "
                        "of a rule for bands; the result is right, and later than it could be"
                    )
                return result
        self._say(f"{type(vae).__name__}.{name} runs whole on every rank: {reason}")
        return original(*args, **kwargs)

    def _gains(self, name: str, given: Tensor) -> bool:
        """True if an image is large enough for bands."""
        mesh, (height, width) = self.context.mesh, given.shape[-2:]
        if mesh.batch.size == mesh.world.size and given.shape[0] % mesh.world.size == 0:
            # Whole images are shared out evenly, and need none.
            return False
        scale = 1 if name == "decode" else _PIXELS_OF_A_LATENT
        return height >= LEAST_ROWS * scale * mesh.world.size and height * width >= LEAST_LATENTS * scale**2

    def _say(self, sentence: str, kind: type[Warning] = UserWarning) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            warnings.warn(sentence, kind, stacklevel=2)


def _why_whole(vae: nn.Module, given: Any, link: Link) -> str | None:
    """The reason why an autoencoder cannot run in bands, and the way out; None: it can. The same on all ranks."""
    if not isinstance(given, Tensor) or given.dim() not in (4, 5):
        return "what it is given is no image and no video; leave vae='bands' out"
    if given.shape[-2] < link.size:
        return f"{given.shape[-2]} rows are too few for {link.size} ranks; leave vae='bands' out, or use fewer ranks"
    if getattr(vae, "use_tiling", False):
        return "tiling is on, which computes another image; leave vae='bands' out, or call vae.disable_tiling()"
    if torch.is_grad_enabled() and (given.requires_grad or any(p.requires_grad for p in vae.parameters())):
        return "a gradient is to pass through it; call it under torch.no_grad()"
    if any(module._compiled_call_impl is not None or hasattr(module, "_orig_mod") for module in vae.modules()):
        return "it is compiled; compile it not, or leave vae='bands' out"
    return None
