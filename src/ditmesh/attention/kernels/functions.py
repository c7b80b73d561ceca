"""Kernels that are a program's own attention functions, inside the strategies' exchanges."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...core import intercept
from ...errors import LayoutError
from .lse import NEG_INF, without_blind

# Attention (B, H, Sq, D) of q (B, H, Sq, D) over k and v (B, H, Sk, D), with a mask and a factor of the scores.
AttendFunction = Callable[[Tensor, Tensor, Tensor, "Tensor | None", "float | None"], Tensor]
# The same, with the natural log-sum-exp (B, H, Sq) of the scores.
AttendWithLse = Callable[[Tensor, Tensor, Tensor, "Tensor | None", "float | None"], "tuple[Tensor, Tensor]"]


class FunctionKernel:
    """A function as a kernel; see `Kernel`. What it calls is not intercepted, torch's attention included.

    Args:
        name: what `ParallelConfig(attention=...)` calls it.
        function: computes attention as `Kernel.attend` does.
        masks: whether it takes masks.
        deterministic: as in `Kernel`.
    """

    def __init__(self, name: str, function: AttendFunction, masks: bool = True, deterministic: bool = False) -> None:
        self.name, self.function, self.masks, self.deterministic = name, function, masks, deterministic

    def supports(self, q_bhsd: Tensor, mask: Tensor | None) -> bool:
        """Any queries; masks if the function takes them."""
        return mask is None or self.masks

    def attend(
        self, q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        """See `Kernel.attend`.

        Raises:
            LayoutError: the function returns another shape.
        """
        with intercept.unhandled():
            return self._checked(self.function(q_bhsd, k_bhsd, v_bhsd, mask, scale), q_bhsd, v_bhsd)

    def _checked(self, out: Tensor, q_bhsd: Tensor, v_bhsd: Tensor) -> Tensor:
        shape = (*q_bhsd.shape[:3], v_bhsd.shape[3])
        if tuple(out.shape) != shape:
            raise LayoutError(
                f"the attention kernel {self.name!r} returned {tuple(out.shape)} for queries of {tuple(q_bhsd.shape)} "
                f"and values of {tuple(v_bhsd.shape)}, where {shape} was expected"
            )
        return out


class FunctionWithLse(FunctionKernel):
    """One that can also serve ring attention; see `KernelWithLse`.

    Args:
        name, function, masks, deterministic: as in `FunctionKernel`.
        with_lse: the same function returning the log-sum-exp, too.
    """

    def __init__(
        self,
        name: str,
        function: AttendFunction,
        with_lse: AttendWithLse,
        masks: bool = True,
        deterministic: bool = False,
    ) -> None:
        super().__init__(name, function, masks, deterministic)
        self._with_lse = with_lse

    def attend_with_lse(
        self, q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, mask: Tensor | None, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """See `KernelWithLse.attend_with_lse`.

        Raises:
            LayoutError: the function returns another shape.
        """
        wide = torch.promote_types(q_bhsd.dtype, torch.float32)
        if k_bhsd.shape[2] == 0:
            return torch.zeros_like(q_bhsd), q_bhsd.new_full(q_bhsd.shape[:3], NEG_INF, dtype=wide)
        with intercept.unhandled():
            out, lse = self._with_lse(q_bhsd, k_bhsd, v_bhsd, mask, scale)
        out = self._checked(out, q_bhsd, v_bhsd)
        if tuple(lse.shape) != tuple(q_bhsd.shape[:3]):
            raise LayoutError(
                f"the attention kernel {self.name!r} returned its log-sum-exp as {tuple(lse.shape)} where "
                f"{tuple(q_bhsd.shape[:3])} was expected, so ring attention cannot merge it"
            )
        # The merge writes into its arguments.
        out = out.clone() if out.data_ptr() in (q_bhsd.data_ptr(), v_bhsd.data_ptr()) else out
        return (out, lse.to(wide)) if mask is None else without_blind(out, lse.to(wide), mask)


def function_kernel(
    name: str,
    function: AttendFunction,
    with_lse: AttendWithLse | None = None,
    masks: bool = True,
    deterministic: bool = False,
) -> FunctionKernel:
    """A function of the program as an attention kernel, for `ditmesh.attention.kernels.register`.

    Args:
        name: what `ParallelConfig(attention=...)` calls it.
        function: takes q (B, H, Sq, D), k and v (B, H, Sk, D), mask (None, boolean or additive, broadcastable to
            (B, H, Sq, Sk)) and scale (None: 1/sqrt(D)), and returns (B, H, Sq, D).
        with_lse: the same, returning the natural log-sum-exp (B, H, Sq) of the scores, too. Without it ``ring`` is an
            error that names the kernel.
        masks: whether it takes masks; without, a call with a mask is an error that names the kernel.
        deterministic: whether equal inputs of equal strides give equal bits; without, ``reproducible`` is an error.
    """
    if with_lse is None:
        return FunctionKernel(name, function, masks, deterministic)
    return FunctionWithLse(name, function, with_lse, masks, deterministic)
