"""One cell at a time: draw, and measure against the synchronous run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.files import written_whole
from .plan import SYNCHRONOUS, Cell, Setup

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...attention.mixer import AttentionCall

# Pictures are kept as (n, h, w, 3) float32 from 0 to 1, beside the predictions of the synchronous run.
SUFFIX = ".pt"


class Runner:
    """Loads the model once and runs cells.

    Args:
        setup: the model and how it is called.
        folder: where pictures, and the predictions of synchronous runs, are kept.
    """

    def __init__(self, setup: Setup, folder: Path) -> None:
        self.setup = setup
        self.folder = folder
        self._pipe: Any = None
        self._plain: Any = None
        self._reference: tuple[str, dict[str, Any]] | None = None

    def run(self, cell: Cell) -> dict[str, Any]:
        """Everything measured of a cell, as plain data; its pictures are on disk."""
        import torch

        pipe = self.pipe(cell.sampler)
        key = cell.key(self.setup)
        began = time.perf_counter()
        result: dict[str, Any] = {"key": key, "cell": asdict(cell)}
        if cell.strategy == SYNCHRONOUS:
            pictures, predictions = draw(pipe, self.setup, cell)
            kept = {"predictions": torch.stack(predictions), "pictures": torch.from_numpy(pictures)}
            with written_whole(self.folder / f"{key}{SUFFIX}") as temporary:
                torch.save(kept, temporary)
        elif cell.real:
            pictures, result["ranks"] = draw_on_ranks(self.setup, cell)
            predictions = []
            simulated = Cell(**{**asdict(cell), "real": False})
            with stale(pipe, simulated), _one_thread():
                expected, _ = draw(pipe, self.setup, simulated)
            result["equal_to_simulation"] = bool(np.array_equal(pictures, expected))
            kept = self._kept(cell)
        else:
            with stale(pipe, cell) as engine:
                taps = Taps(pipe, engine) if cell.detail else None
                with taps or nullcontext():
                    pictures, predictions = draw(pipe, self.setup, cell)
                log = engine.staleness
            kept = self._kept(cell)
            if log is not None:
                result["steps"] = [asdict(record) for record in log.steps]
            result["prediction_error"] = _errors(predictions, kept["predictions"], len(cell.prompts))
            if taps is not None:
                result["attention_error"] = taps.attention_errors()
                result["same_latents"] = taps.same_latents(len(predictions))
        result["seconds"] = time.perf_counter() - began
        result["evaluations"] = len(kept["predictions"])
        result["pictures"] = self._judge(cell, key, pictures, kept["pictures"].numpy())
        return result

    def pipe(self, sampler: str) -> Any:
        """The pipeline with a sampler."""
        from .samplers import set_sampler

        if self._pipe is None:
            self._pipe = load(self.setup)
            self._plain = self._pipe.scheduler
        set_sampler(self._pipe, sampler, self._plain)
        return self._pipe

    def _kept(self, cell: Cell) -> dict[str, Any]:
        import torch

        key = cell.reference.key(self.setup)
        if self._reference is None or self._reference[0] != key:
            self._reference = key, torch.load(self.folder / f"{key}{SUFFIX}", weights_only=True)
        return self._reference[1]

    def _judge(self, cell: Cell, key: str, pictures: np.ndarray, reference: np.ndarray) -> list[dict[str, Any]]:
        from PIL import Image

        from ...quality.metrics import compare
        from ...quality.perceptual import available

        right = nearest_is_right(Path(self.setup.model), cell, pictures)
        found = []
        for number, (picture, exact) in enumerate(zip(pictures, reference, strict=True)):
            name = f"{key}-{number}.png"
            Image.fromarray(eight_bits(picture)).save(self.folder / name)
            apart = compare(picture, exact, perceptual=available())
            found.append(
                {
                    "file": name,
                    "prompt": cell.prompts[number],
                    "seed": cell.seeds[number],
                    "equal": apart.equal,
                    "psnr": apart.psnr,
                    "ssim": apart.ssim,
                    "perceptual": apart.perceptual,
                    "right": None if right is None else right[number],
                }
            )
        return found


def load(setup: Setup) -> Any:
    """The pipeline of a study, quiet, on its device."""
    import diffusers

    from ...generate.run import load_pipeline, quieten

    quieten()
    diffusers.utils.logging.set_verbosity_error()
    return load_pipeline(setup.model, setup.name, setup.dtype, setup.device)


def draw(pipe: Any, setup: Setup, cell: Cell) -> tuple[np.ndarray, list[Tensor]]:
    """The pictures of a cell (n, h, w, 3), float32, and what the sampler was given in every evaluation."""
    import torch

    from ...core.patching import Patch
    from ...generate.run import call_parameters, sizes
    from ...strategies.pipefusion.lazy import whole_of

    arguments: dict[str, Any] = {
        "num_inference_steps": setup.steps,
        "generator": [torch.Generator("cpu").manual_seed(seed) for seed in cell.seeds],
        "output_type": "np",
    }
    if cell.labels:
        arguments["class_labels"] = list(cell.labels)
    else:
        arguments["prompt"] = list(cell.prompts)
    if setup.guidance is not None:
        arguments["guidance_scale"] = setup.guidance
    arguments |= sizes(call_parameters(pipe), setup.size, setup.max_sequence_length)
    predictions: list[Tensor] = []
    step = pipe.scheduler.step

    def recorded(model_output: Tensor, *args: Any, **kwargs: Any) -> Any:
        # PipeFusion's patches may still be on their way: here they are waited for.
        predictions.append(whole_of(model_output).detach().float().cpu().clone())
        return step(model_output, *args, **kwargs)

    undo = Patch(pipe.scheduler, "step", recorded)
    try:
        # Some samplers draw noise in every step, and some pipelines hand them no generator.
        with torch.random.fork_rng():
            torch.manual_seed(cell.seeds[0])
            pictures = pipe(**arguments).images
    finally:
        undo()
    # A run that went astray has no picture, and black is as far from one as any other.
    return np.nan_to_num(np.asarray(pictures, dtype=np.float32)), predictions


@contextmanager
def stale(pipe: Any, cell: Cell) -> Iterator[Any]:
    """The pipeline with a cell's strategy, simulated in this process; the engine."""
    from ...engine import engine_of, parallelize, restore, simulate

    (parallelize if cell.strategy == "pipefusion" else simulate)(pipe, cell.config())
    try:
        engine = engine_of(pipe)
        if engine.control is not None:
            engine.control.measure_drift = True
        yield engine
    finally:
        restore(pipe)


def eight_bits(picture: np.ndarray) -> np.ndarray:
    """Values from 0 to 1 as bytes."""
    return (picture * 255.0).round().clip(0, 255).astype(np.uint8)


def _errors(predictions: Sequence[Tensor], exact: Tensor, pictures: int) -> list[list[float]]:
    """For every evaluation and picture the relative L2 distance of the prediction from the synchronous run's.

    A pipeline may hand its sampler the same rows twice, one for each branch of guidance: the first ones are taken.
    """
    return [
        [_relative(ours[row], theirs[row]) for row in range(pictures)]
        for ours, theirs in zip(predictions, exact, strict=True)
    ]


def _relative(ours: Tensor, exact: Tensor) -> float:
    return float((ours - exact).norm() / exact.norm().clamp_min(1e-30))


class Taps:
    """Measures inside a simulated run: attention errors by block and step, and the transformer's calls for later.

    The exact attention on the same queries, keys and values needs those of all virtual ranks: one more exchange,
    which changes nothing in the run.
    """

    def __init__(self, pipe: Any, engine: Any) -> None:
        from ...engine import denoisers

        self._models: list[nn.Module] = denoisers(pipe)
        self._engine = engine
        self._undo: list[Callable[[], None]] = []
        self._calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Tensor]] = []
        self._sums: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0])

    def __enter__(self) -> Taps:
        for model, hooks in zip(self._models, self._engine.hooks, strict=True):
            handle = model.register_forward_hook(self._called, with_kwargs=True)
            self._undo.append(handle.remove)
            for handler in getattr(hooks.handler, "handlers", ()):
                if hasattr(handler, "attend_stale"):
                    self._tap(handler)
        return self

    def __exit__(self, *exception: object) -> None:
        while self._undo:
            self._undo.pop()()

    def _called(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        from ...strategies.pipefusion.lazy import whole_of

        self._calls.append((model, _kept(args), _kept(kwargs), whole_of(_first(output)).detach().clone()))

    def _tap(self, handler: Any) -> None:
        from ...core.patching import Patch
        from ...strategies.sequence import SequenceParallel

        inner = handler.attend_stale

        def attend_stale(key: Any, attention: AttentionCall) -> Tensor:
            out = inner(key, attention)
            control = handler.control
            if not control.decision.synchronous:
                exact = SequenceParallel.attend_distributed(handler, attention)
                sums = self._sums[key[1], control.clock.call.step]
                sums[0] += float((out - exact).float().square().sum())
                sums[1] += float(exact.float().square().sum())
            return out

        self._undo.append(Patch(handler, "attend_stale", attend_stale))

    def attention_errors(self) -> dict[str, dict[int, float]]:
        """By block and stale step: relative L2 error of the attention's output, over all ranks, heads and branches."""
        found: dict[str, dict[int, float]] = {}
        for (block, step), (distance, size) in self._sums.items():
            found.setdefault(block, {})[step] = (distance / max(size, 1e-30)) ** 0.5
        return found

    def same_latents(self, evaluations: int) -> list[float]:
        """For every evaluation the relative L2 error of what the transformer returned, on the very same inputs.

        Call it when the strategy is off: the exact transformer runs on all inputs again.
        """
        import torch

        per = max(1, len(self._calls) // max(1, evaluations))
        sums = [[0.0, 0.0] for _ in range(-(-len(self._calls) // per))]
        with torch.no_grad():
            for number, (model, args, kwargs, output) in enumerate(self._calls):
                exact = _first(model(*args, **kwargs)).float()
                sums[number // per][0] += float((output.float() - exact).square().sum())
                sums[number // per][1] += float(exact.square().sum())
        return [(distance / max(size, 1e-30)) ** 0.5 for distance, size in sums]


def _kept(arguments: Any) -> Any:
    """Arguments of a call that may be used again: some pipelines write their latents in place."""
    import torch

    from ...strategies.pipefusion.lazy import whole_of

    if isinstance(arguments, torch.Tensor):
        return whole_of(arguments).detach().clone()
    if isinstance(arguments, dict):
        return {name: _kept(value) for name, value in arguments.items()}
    return type(arguments)(map(_kept, arguments)) if type(arguments) in (list, tuple) else arguments


def _first(output: Any) -> Tensor:
    return output if hasattr(output, "norm") else output[0]


def nearest_is_right(model: Path, cell: Cell, pictures: np.ndarray) -> list[bool] | None:
    """For every picture whether the nearest training picture is the one its prompt names; None: not known.

    Known of the embedded models, whose folders hold their training pictures, for prompts that are captions.
    """
    import json

    from ... import zoo

    if zoo.embedded(model) is None:
        return None
    from ...zoo.references import nearest, read_references, read_sheet, shrink

    entries = json.loads((model / "captions.json").read_text(encoding="utf-8"))
    drawn = np.stack([eight_bits(picture) for picture in pictures])
    if cell.labels:
        references = read_references(model, len(entries), drawn.shape[1])
        seen = references.reshape(-1, *references.shape[2:])
        found = nearest(shrink(drawn, references.shape[2]), seen) // references.shape[1]
        return [bool(number == label) for number, label in zip(found, cell.labels, strict=True)]
    numbers = {name: place for place, entry in enumerate(entries) for name in (entry["caption"], *entry["also"])}
    if any(prompt not in numbers for prompt in cell.prompts):
        return None
    found = nearest(shrink(drawn), read_sheet(model / "thumbnails.png", len(entries)))
    return [bool(number == numbers[prompt]) for number, prompt in zip(found, cell.prompts, strict=True)]


# --------------------------------------------------------------------------------------------------
# On real ranks


def draw_on_ranks(setup: Setup, cell: Cell) -> tuple[np.ndarray, list[dict[str, float]]]:
    """The pictures as real ranks draw them, and for every rank its seconds, and those spent inside collectives."""
    from ...launch import launcher

    with launcher(None, cell.devices, "cuda" if setup.device == "cuda" else "cpu", threads=1) as pool:
        found = pool.run(rank_of_cell, setup, cell)
    return found[0][0], [times for _, times in found]


def rank_of_cell(setup: Setup, cell: Cell) -> tuple[np.ndarray | None, dict[str, float]]:
    """What one rank does: draws twice, and times the second time."""
    import torch.distributed as dist

    from ...engine import engine_of, parallelize, restore
    from .samplers import set_sampler

    pipe = load(setup)
    set_sampler(pipe, cell.sampler, pipe.scheduler)
    parallelize(pipe, cell.config())
    try:
        engine = engine_of(pipe)
        draw(pipe, setup, cell)
        with Waiting() as waiting:
            dist.barrier()
            engine.mesh.traffic.reset()
            began = time.perf_counter()
            pictures, _ = draw(pipe, setup, cell)
            total = time.perf_counter() - began
        sent = float(engine.mesh.traffic.bytes_sent.total())
    finally:
        restore(pipe)
    times = {"seconds": total, "in_collectives": waiting.seconds, "bytes_sent": sent}
    return (pictures if dist.get_rank() == 0 else None), times


@contextmanager
def _one_thread() -> Iterator[None]:
    """As ranks have: kernels may round otherwise with more."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Waiting:
    """Adds up the seconds that are spent inside links: sending, and waiting for other ranks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Waiting:
        from ...comm.link import Link, Transfer

        moves = ("all_to_all", "all_gather", "all_gather_list", "all_reduce", "shift", "send", "receive", "broadcast")
        moves += ("all_gather_async", "all_reduce_async")
        for owner, names in ((Link, moves), (Transfer, ("wait",))):
            for name in names:
                self._time(owner, name)
        return self

    def __exit__(self, *exception: object) -> None:
        while self._undo:
            self._undo.pop()()

    def _time(self, owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return inner(*args, **kwargs)
            self._inside, began = True, time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self._inside = False
                self.seconds += time.perf_counter() - began

        setattr(owner, name, timed)
        self._undo.append(lambda: setattr(owner, name, inner))
