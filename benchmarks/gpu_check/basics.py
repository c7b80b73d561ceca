"""What every part of the check uses: the device, tolerances, rows."""

from __future__ import annotations

import hashlib
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
for folder in ("tests", "src", "benchmarks"):
    sys.path.insert(0, str(ROOT / folder))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

Row = dict[str, Any]
# In the environment of the worker processes: "cpu" where the check is to leave the GPU alone.
CHOSEN = "GPU_CHECK_DEVICE"
ON_GPU = torch.cuda.is_available() and os.environ.get(CHOSEN) != "cpu"
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Relative to the largest magnitude of the truth.
TOLERANCES = {"float32": 2e-5, "float16": 5e-3, "bfloat16": 4e-2}


class Skipped(Exception):
    """A part or row that cannot run here; says why."""


def relative_error(value: Tensor, truth: Tensor) -> float:
    """Largest difference over the largest magnitude of the truth; infinite where something is not a number."""
    error = float((value.double() - truth.double()).abs().max() / truth.double().abs().max())
    return error if error == error else float("inf")


def digest(tensor: Tensor) -> str:
    """Of every bit."""
    return hashlib.sha256(tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def moved(value: Any, dtype: torch.dtype) -> Any:
    """Arguments on the device, floating-point tensors in ``dtype``."""
    if isinstance(value, Tensor):
        return value.to(DEVICE, dtype) if value.is_floating_point() else value.to(DEVICE)
    if isinstance(value, dict):
        return {key: moved(item, dtype) for key, item in value.items()}
    return [moved(item, dtype) for item in value] if isinstance(value, list) else value


def wait() -> None:
    """Until the device has done everything."""
    if ON_GPU:
        torch.cuda.synchronize()


def milliseconds(function: Callable[[], Any], runs: int) -> float:
    """Median of ``runs`` calls after two that do not count, the device empty before and after each."""
    times = []
    for _ in range(runs + 2):
        wait()
        start = time.perf_counter()
        function()
        wait()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[2:])


def ditmesh() -> Any:
    """The package, if the engine can be imported.

    Raises:
        Skipped: naming the module that is missing.
    """
    try:
        import ditmesh
        import ditmesh.engine
    except ModuleNotFoundError as error:
        raise Skipped(f"the engine needs {error.name}, which is not installed") from None
    return ditmesh


def refusals() -> tuple[type[Exception], ...]:
    """What ditmesh raises for what it cannot show right."""
    from ditmesh import errors

    return errors.ConfigError, errors.InputError, errors.LayoutError


def first_line(error: BaseException, length: int = 300) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:length]


def guarded(row: Row, check: Callable[[], Row]) -> Row:
    """The row with what ``check`` finds: one failure is one row's."""
    try:
        return {**row, **check()}
    except Skipped as reason:
        return {**row, "skipped": str(reason)}
    except Exception as error:
        return {**row, "ok": False, "failed": first_line(error)}


def quieten() -> None:
    """Warnings of libraries say nothing about ditmesh."""
    warnings.filterwarnings("ignore")
    with suppress(ImportError):
        import diffusers

        diffusers.utils.logging.set_verbosity_error()
        diffusers.utils.logging.disable_progress_bar()


def exact_float32() -> None:
    """Convolutions of cuDNN are computed in TF32 unless one says otherwise: float32 is compared in float32 here."""
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
