"""Attention on one device: the kernels that `ParallelConfig(attention=...)` chooses from, by name.

A kernel computes softmax attention over keys and values that are all here; the strategies bring them together. One
that also tells the log-sum-exp of its scores can serve ring attention, which merges partial results. `register` adds a
kernel; every rank has to, before it calls `ditmesh.parallelize`.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from ...comm.autograd import tracked
from ...errors import ConfigError, LayoutError
from .builtin import Math, Native
from .lse import attend_backward, attend_with_lse, attend_with_lse_reference, merge_

__all__ = [
    "Kernel",
    "KernelWithLse",
    "LocalAttention",
    "attend_backward",
    "attend_with_lse",
    "attend_with_lse_reference",
    "local_attention",
    "merge_",
    "register",
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
        """Whether it can compute with queries of this dtype, device and head size, and with a mask, if there is one."""
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
    """A kernel that can also serve ring attention."""

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
    """Make a kernel known under its name. Registering the same object again does nothing.

    Raises:
        ConfigError: another one has the name.
    """
    if KERNELS.setdefault(kernel.name, kernel) is not kernel:
        raise ConfigError(f"there is an attention kernel {kernel.name!r} already; give this one another name")


class LocalAttention:
    """A kernel as strategies call it: what it does not support is refused by name."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    @property
    def is_torch(self) -> bool:
        """Whether it is torch's own function that computes."""
        return isinstance(self.kernel, Native) and self.kernel.replaced() is None

    def __call__(
        self, q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, mask: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """See `Kernel.attend`.

        Raises:
            LayoutError: the kernel does not support the call, or gradients are asked for and it has none.
        """
        self._check(q_bhsd, mask)
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
        """See `KernelWithLse.attend_with_lse`."""
        self._check(q_bhsd, mask)
        assert isinstance(self.kernel, KernelWithLse)
        return self.kernel.attend_with_lse(q_bhsd, k_bhsd, v_bhsd, mask, scale)

    def _check(self, q_bhsd: Tensor, mask: Tensor | None) -> None:
        if not self.kernel.supports(q_bhsd, mask):
            raise LayoutError(
                f"attention={self.kernel.name!r} does not support queries of {tuple(q_bhsd.shape)} in {q_bhsd.dtype} "
                f"on {q_bhsd.device}{'' if mask is None else ' with a mask'}; use attention='native'"
            )


def local_attention(name: str, ring: int = 1, reproducible: bool = False) -> LocalAttention:
    """The kernel of that name, for these uses.

    Args:
        name: as in `ParallelConfig(attention=...)`.
        ring: ranks between which keys travel while attention is computed; above 1 it has to tell its LSE.
        reproducible: whether its bits have to be those of any other call with the same inputs.

    Raises:
        ConfigError: there is none of that name, or it cannot be used so; naming those that can.
    """
    kernel = KERNELS.get(name)
    if kernel is None:
        raise ConfigError(
            f"attention={name!r} is no kernel here; use {' or '.join(map(repr, KERNELS))}, or register it on every "
            "rank with ditmesh.attention.kernels.register before parallelize"
        )
    replaced = kernel.replaced() if isinstance(kernel, Native) else None
    if ring > 1 and (replaced or not isinstance(kernel, KernelWithLse)):
        able = [repr(other.name) for other in KERNELS.values() if isinstance(other, KernelWithLse) and other != kernel]
        raise ConfigError(
            f"{replaced or f'attention={name!r}'} does not tell the log-sum-exp of its scores, which ring={ring} "
            f"needs; use ulysses={ring}, or attention={' or '.join(able)}"
        )
    if reproducible and (replaced or not kernel.deterministic):
        able = [repr(other.name) for other in KERNELS.values() if other.deterministic and other != kernel]
        raise ConfigError(
            f"{replaced or f'attention={name!r}'} does not promise the same bits for the same inputs, which "
            f"reproducible=True needs; use attention={' or '.join(able)}"
        )
    return LocalAttention(kernel)
