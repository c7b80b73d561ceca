"""Attention on one device: the kernels that `ParallelConfig(attention=...)` chooses from, by name.

A kernel computes softmax attention over keys and values that are all here; the strategies bring them together. One
that also returns the log-sum-exp of its scores can serve ring attention, which merges partial results. The attention
backends of diffusers are kernels by their names there (`backends`). `register` adds one of your own; every rank has to,
before it calls `ditmesh.parallelize`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache, partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ...core.intercept import unhandled, with_all_heads
from ...core.values import tracked
from ...errors import ConfigError, LayoutError, did_you_mean
from .backends import DiffusersKernel, backend_kernel, backends_of, known_backends
from .builtin import Math, Native
from .lse import attend_backward, attend_with_lse, attend_with_lse_reference, merge_, merge_out_, unrounded

__all__ = [
    "Kernel",
    "KernelWithLse",
    "LocalAttention",
    "attend_backward",
    "attend_with_lse",
    "attend_with_lse_reference",
    "backends_of",
    "local_attention",
    "merge_",
    "merge_out_",
    "register",
    "unrounded",
]


class Kernel(Protocol):
    """Softmax attention on one device. Shapes: q (B, H, Sq, D), k and v (B, H, Sk, D), as many heads in all three.

    Attributes:
        name: what `ParallelConfig(attention=...)` calls it.
        deterministic: whether equal inputs of equal strides give equal bits; only then may reproducible mode use it.
    """

    name: str
    deterministic: bool

    def supports(self, q_bhsd: Tensor, mask: Tensor | None) -> bool:
        """True if the kernel supports queries of this dtype, device and head size, and the mask, if any."""
        ...

    def attend(
        self, q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        """The attention output (B, H, Sq, D) in q's dtype.

        Args:
            q_bhsd, k_bhsd, v_bhsd: of any strides.
            mask: None, boolean (True = attend) or additive; broadcastable to (B, H, Sq, Sk).
            scale: factor of the scores; None: 1/sqrt(D).
        """
        ...


@runtime_checkable
class KernelWithLse(Kernel, Protocol):
    """A kernel that also supports ring attention."""

    def attend_with_lse(
        self, q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, mask: Tensor | None, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """The output, which the caller may overwrite, and the natural log-sum-exp (B, H, Sq) of the scores.

        The latter in float32, or float64 for float64 queries.

        There may be no keys (Sk = 0). A query that may attend to nothing has output 0 and LSE -inf.
        """
        ...


KERNELS: dict[str, Kernel] = {"native": Native(), "math": Math()}


def register(kernel: Kernel) -> None:
    """Register a kernel under its name, once or more often; `ConfigError`: another kernel has the name."""
    if KERNELS.setdefault(kernel.name, kernel) is not kernel:
        raise ConfigError(f"there is an attention kernel {kernel.name!r} already; give this one another name")


class LocalAttention:
    """The kernel of one transformer's attention for strategies; unsupported inputs raise an error with its name.

    Args:
        kernel: the one in force at first.
        choose: the kernel that is a backend of diffusers, by name: a call gets the one that it asks for. None: all
            calls get ``kernel``.
    """

    def __init__(self, kernel: Kernel, choose: Callable[[str], Kernel] | None = None) -> None:
        self.kernel = kernel
        self._choose = None if choose is None else cache(choose)
        # The model's own backend, if the configuration replaces it.
        self._replaced = {"native"}

    @property
    def is_torch(self) -> bool:
        """True if torch's own function computes attention."""
        return isinstance(self.kernel, Native) and self.kernel.replaced() is None

    def prepare(self, backends: Collection[str], sample_bhsd: Tensor) -> None:
        """Check the backends that a model uses, before it runs.

        Args:
            backends: those that are set on it.
            sample_bhsd: of the dtype, device and head size of its queries.

        `ConfigError`: a kernel cannot be used, as for `local_attention`; or it does not support such queries.
        """
        self._replaced |= {*backends}
        for kernel in [self.kernel] if self._choose is None else map(self._choose, sorted(backends)):
            if isinstance(kernel, DiffusersKernel) and not kernel.supports(sample_bhsd, None):
                raise ConfigError(f"{_refusal(kernel, sample_bhsd, None)} (or another dtype or device)")

    def asked_for(self, backend: str | None) -> None:
        """The call at hand asks for an attention backend of diffusers; None: for torch's function.

        `ConfigError`: it cannot be used, as for `local_attention`; or another kernel is configured, and the model was
        set to the backend afterwards.
        """
        name = backend or "native"
        if self._choose is not None:
            self.kernel = self._choose(name)
        elif name not in self._replaced and name != self.kernel.name:
            raise ConfigError(
                f"the model asks for the attention backend {name!r}, but attention={self.kernel.name!r} was configured "
                f"when it had {' and '.join(map(repr, sorted(self._replaced)))}; restore it and parallelize again with "
                f"attention={name!r} or without attention"
            )

    def __call__(
        self, q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, mask: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """See `Kernel.attend`; keys and values may have fewer heads, each for as many of the queries' heads.

        `LayoutError`: the kernel does not support the call, or gradients are asked for and it has none.
        """
        self._check(q_bhsd, mask)
        k_bhsd, v_bhsd = with_all_heads(q_bhsd, k_bhsd, v_bhsd)
        # What a kernel calls in turn, torch's attention included, is its own business.
        with unhandled():
            out = self.kernel.attend(q_bhsd, k_bhsd, v_bhsd, mask, scale)
        if not out.requires_grad and tracked(q_bhsd, k_bhsd, v_bhsd):
            raise LayoutError(
                f"attention={self.kernel.name!r} passes no gradient on; train with attention='native', or call the "
                "model under torch.no_grad()"
            )
        return out

    def with_lse(
        self, q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, mask: Tensor | None = None, scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        self._check(q_bhsd, mask)
        assert isinstance(self.kernel, KernelWithLse)
        with unhandled():
            return self.kernel.attend_with_lse(q_bhsd, k_bhsd, v_bhsd, mask, scale)

    def unrounded(self, q_bhsd: Tensor) -> torch.dtype:
        """The dtype of the copies of queries, keys and values from which parts come unrounded; see `lse.unrounded`.

        A kernel that has no such method gets the tensors as they are.
        """
        told: Callable[[Tensor], torch.dtype] | None = getattr(self.kernel, "unrounded", None)
        return q_bhsd.dtype if told is None else told(q_bhsd)

    def _check(self, q_bhsd: Tensor, mask: Tensor | None) -> None:
        by_pairs = mask is None or isinstance(mask, Tensor)
        if not self.kernel.supports(q_bhsd, mask) or not (by_pairs or self.kernel.name == "flex"):
            raise LayoutError(_refusal(self.kernel, q_bhsd, mask))


def _refusal(kernel: Kernel, q_bhsd: Tensor, mask: Tensor | None) -> str:
    kind = "BlockMask" if mask is not None and not isinstance(mask, Tensor) else f"{getattr(mask, 'dtype', '')} mask"
    given = "" if mask is None else f" with a {kind} of {tuple(mask.shape)}"
    return (
        f"attention={kernel.name!r} does not support queries of {tuple(q_bhsd.shape)} in {q_bhsd.dtype} on "
        f"{q_bhsd.device}{given}; use attention={'flex' if kind == 'BlockMask' else 'native'!r}"
    )


def local_attention(name: str | None = None, ring: int = 1, reproducible: bool = False) -> LocalAttention:
    """The kernel that is configured, or those that the model asks for, for these uses.

    Args:
        name: as in `ParallelConfig(attention=...)`; None: each call has the one that it asks for, torch's
            `scaled_dot_product_attention` or the attention backend of diffusers that is set on the model.
        ring: ranks between which keys travel while attention is computed; above 1 a kernel has to return its LSE.
        reproducible: whether its bits have to be those of any other call with the same inputs.

    `ConfigError`: as `_usable` does.
    """
    choose = partial(_usable, ring=ring, reproducible=reproducible)
    # A replaced torch function is rejected before any call.
    return LocalAttention(choose(name or "native"), choose if name is None else None)


def _usable(name: str, ring: int, reproducible: bool) -> Kernel:
    """The kernel of that name, for the uses of `local_attention`."""
    kernel = KERNELS.get(name) or backend_kernel(name)
    if kernel is None:
        backends = known_backends()
        raise ConfigError(
            f"attention={name!r} is no kernel here; use {' or '.join(map(repr, KERNELS))}, or an attention backend of "
            f"diffusers ({', '.join(backends)}), or register it on every rank with ditmesh.attention.kernels.register "
            f"before parallelize{did_you_mean(name, [*KERNELS, *backends])}"
        )
    replaced = kernel.replaced() if isinstance(kernel, Native) else None
    if ring > 1 and (replaced or not isinstance(kernel, KernelWithLse)):
        able = [repr(other.name) for other in KERNELS.values() if isinstance(other, KernelWithLse) and other != kernel]
        raise ConfigError(
            f"{replaced or f'attention={name!r}'} does not return the log-sum-exp of its scores, which ring={ring} "
            f"needs; use ulysses={ring}, or attention={' or '.join(able)}"
        )
    if reproducible and (replaced or not kernel.deterministic):
        able = [repr(other.name) for other in KERNELS.values() if other.deterministic and other != kernel]
        raise ConfigError(
            f"{replaced or f'attention={name!r}'} does not promise the same bits for the same inputs, which "
            f"reproducible=True needs; use attention={' or '.join(able)}"
        )
    return kernel
