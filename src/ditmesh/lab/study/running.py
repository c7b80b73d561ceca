"""One cell of a study: generate its images and compare them with the synchronous run."""

from __future__ import annotations

import functools
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from itertools import pairwise
from math import isqrt, log10
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from ... import zoo
from ...core.files import written_whole
from ...quality.metrics import compare
from ..pages.charts import eight_bits
from .plan import SYNCHRONOUS, Cell, Setup
from .samplers import set_sampler

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...attention.mixer import AttentionCall

# Of the files with images, (n, h, w, 3) float32 from 0 to 1, or videos, (n, frames, h, w, 3), and predictions of a
# synchronous run.
SUFFIX = ".pt"
# Number of frames of a video that are kept as an image, and number per row.
SHOWN_FRAMES, IN_ROW = 8, 4


class Runner:
    """Loads the model once and runs cells; images, and predictions of synchronous runs, are kept in a folder.

    Real ranks are those of the launcher of that name; see `ditmesh.launch.launcher`.
    """

    def __init__(self, setup: Setup, folder: Path, launcher: str | None = None) -> None:
        self.setup, self._launcher = setup, launcher
        self.folder = folder
        self._pipe: Any = None
        self._plain: Any = None
        self._reference: tuple[str, dict[str, Any]] | None = None
        self._alone: tuple[str, float] | None = None

    def run(self, cell: Cell) -> dict[str, Any]:
        """All measurements of a cell, as plain data; its images are on disk."""
        import torch

        pipe = self.pipe(cell.sampler)
        key = cell.key(self.setup)
        began = time.perf_counter()
        result: dict[str, Any] = {"key": key, "cell": asdict(cell)}
        if cell.strategy == SYNCHRONOUS:
            images, predictions = run_cell(pipe, self.setup, cell)
            reference = {"predictions": torch.stack(predictions), "images": torch.from_numpy(images)}
            with written_whole(self.folder / f"{key}{SUFFIX}") as temporary:
                torch.save(reference, temporary)
        elif cell.real:
            images, result["ranks"] = generate_on_ranks(self.setup, cell, self._launcher)
            simulated = replace(cell, real=False)
            with stale(pipe, simulated), _one_thread():
                expected, _ = run_cell(pipe, self.setup, simulated)
            result["one_device_seconds"] = self._seconds_alone(cell, pipe)
            result["sent"] = dict(sum((Counter(rank["sent"]) for rank in result["ranks"]), Counter()))
            result["equal_to_simulation"] = bool(np.array_equal(images, expected))
            reference = self._kept(cell)
        else:
            with stale(pipe, cell) as engine:
                taps = Taps(pipe, engine) if cell.detail else None
                with taps or nullcontext():
                    images, predictions = run_cell(pipe, self.setup, cell)
                log = engine.staleness
                # Patches in one process send nothing, unlike patches on several ranks.
                patches = cell.strategy.startswith("pipefusion")
                result["sent"] = None if patches else dict(engine.mesh.traffic.bytes_sent)
            reference = self._kept(cell)
            if log is not None:
                result["steps"] = [asdict(record) for record in log.steps]
            # A pipeline may hand its sampler the same rows twice, one for each branch of guidance: the first count.
            result["prediction_error"] = [
                [
                    float((ours[n] - exact[n]).norm() / exact[n].norm().clamp_min(1e-30))
                    for n in range(len(cell.prompts))
                ]
                for ours, exact in zip(predictions, reference["predictions"], strict=True)
            ]
            if taps is not None:
                result["attention_error"] = taps.attention_errors()
                result["same_latents"] = taps.same_latents(len(predictions))
                result["token_error"] = token_errors(predictions, reference["predictions"], len(cell.prompts))
        result["seconds"] = time.perf_counter() - began
        result["evaluations"] = len(reference["predictions"])
        result["images"] = self._compare(cell, key, images, reference["images"].numpy())
        return result

    def pipe(self, sampler: str) -> Any:
        """The pipeline with a sampler."""
        if self._pipe is None:
            self._pipe = load_study_pipeline(self.setup)
            self._plain = self._pipe.scheduler
        set_sampler(self._pipe, sampler, self._plain)
        return self._pipe

    def _seconds_alone(self, cell: Cell, pipe: Any) -> float:
        """The time of one device for a cell's images, without the strategy, after the same warm-up as the ranks."""
        key = cell.reference.key(self.setup)
        if self._alone is None or self._alone[0] != key:
            with _one_thread():
                began = time.perf_counter()
                run_cell(pipe, self.setup, cell.reference)
                self._alone = key, time.perf_counter() - began
        return self._alone[1]

    def _kept(self, cell: Cell) -> dict[str, Any]:
        """Images and predictions of the synchronous reference run."""
        import torch

        key = cell.reference.key(self.setup)
        if self._reference is None or self._reference[0] != key:
            self._reference = key, torch.load(self.folder / f"{key}{SUFFIX}", weights_only=True)
        return self._reference[1]

    def _compare(self, cell: Cell, key: str, images: np.ndarray, reference: np.ndarray) -> list[dict[str, Any]]:
        right = nearest_matches_prompt(Path(self.setup.model), cell, images) or [None] * len(images)
        compared = []
        for number, (image, exact) in enumerate(zip(images, reference, strict=True)):
            name = f"{key}-{number}.png"
            Image.fromarray(eight_bits(_as_one(image))).save(self.folder / name)
            frames = list(zip(image, exact, strict=True)) if image.ndim == 4 else [(image, exact)]
            measures = distances(frames)
            asked = {"file": name, "prompt": cell.prompts[number], "seed": cell.seeds[number]}
            compared.append({**asked, **measures, "right": right[number]})
        return compared


def distances(frames: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    """The distances of an image's pairs of frames: PSNR over all values, means over frames for the others."""
    apart = [compare(*pair) for pair in frames]
    error = float(np.mean([0.0 if frame.psnr is None else 10 ** (-frame.psnr / 10) for frame in apart]))
    return {
        "equal": all(frame.equal for frame in apart),
        "psnr": -10 * log10(error) if error else None,
        "ssim": float(np.mean([frame.ssim for frame in apart])),
    }


def _as_one(pixels: np.ndarray) -> np.ndarray:
    if pixels.ndim == 3:
        return pixels
    places = np.linspace(0, len(pixels) - 1, min(SHOWN_FRAMES, len(pixels))).round().astype(int)
    places = places[: len(places) - len(places) % IN_ROW or None]
    rows = [places[start : start + IN_ROW] for start in range(0, len(places), IN_ROW)]
    return np.concatenate([np.concatenate(list(pixels[row]), axis=1) for row in rows])


def load_study_pipeline(setup: Setup) -> Any:
    """The pipeline of a study, quiet, on its device."""
    import diffusers
    import torch

    from ...generate.loading import read_pipeline
    from ...generate.model_info import find_model
    from ...generate.runner import quieten

    quieten()
    diffusers.utils.logging.set_verbosity_error()
    pipe = read_pipeline(find_model(setup.model), torch_dtype=getattr(torch, setup.dtype))
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(setup.device)


def run_cell(
    pipe: Any, setup: Setup, cell: Cell, on_step: Callable[[], object] | None = None
) -> tuple[np.ndarray, list[Tensor]]:
    """The images of a cell, and the sampler's input in every evaluation, at each of which ``on_step`` is called.

    Images are float32 (n, h, w, 3), videos (n, frames, h, w, 3), with values from 0 to 1.
    """
    import torch

    from ...generate.job import PictureJob
    from ...generate.outputs import Picture
    from ...generate.runner import PipelineRunner
    from ...generate.steps import SchedulerStep, StepEvents
    from ...parts.part import whole_of

    width, height = setup.size or (None, None)
    job = PictureJob(
        model=setup.model,
        name=setup.name,
        pipeline_class=type(pipe).__name__,
        prompts=cell.prompts,
        labels=cell.labels,
        out="",
        width=width,
        height=height,
        steps=setup.steps,
        guidance=setup.guidance,
        seed=cell.seeds[0],
        frames=setup.frames,
        max_sequence_length=setup.max_sequence_length,
    )
    # All prompts in one call.
    more: dict[str, Any] = {"generator": [torch.Generator("cpu").manual_seed(seed) for seed in cell.seeds]}
    more |= {"class_labels": list(cell.labels)} if cell.labels else {"prompt": list(cell.prompts)}
    runner = PipelineRunner(pipe, torch.device(setup.device))
    predictions: list[Tensor] = []

    def recorded(step: SchedulerStep) -> None:
        # PipeFusion's patches may still be on their way: here they are waited for.
        predictions.append(whole_of(step.prediction).detach().float().cpu().clone())
        if on_step is not None:
            on_step()

    events = StepEvents(pipe.scheduler, recorded)
    try:
        outputs = runner.run(runner.prepare(job, **more, output_type="np"))
    finally:
        events.undo()
    # A run that diverged has no image; a black one is used.
    images = [one.image if isinstance(one, Picture) else one.frames for one in outputs]
    return np.nan_to_num(np.asarray(images, dtype=np.float32)), predictions


@contextmanager
def stale(pipe: Any, cell: Cell) -> Iterator[Any]:
    """The pipeline with a cell's strategy, simulated in this process; the engine."""
    from ...engine import engine_of, parallelize, restore
    from .simulation import simulate

    (parallelize if cell.strategy.startswith("pipefusion") else simulate)(pipe, cell.config())
    try:
        engine = engine_of(pipe)
        if engine.control is not None:
            engine.control.measure_drift = True
        yield engine
    finally:
        restore(pipe)


class Taps:
    """Measures inside a simulated run: attention errors by block and step, and the transformer's calls for later.

    The exact attention on the same queries, keys and values needs those of all virtual ranks: one more exchange,
    which changes nothing in the run and is not counted.
    """

    def __init__(self, pipe: Any, engine: Any) -> None:
        from ...engine import denoisers

        self._models: list[nn.Module] = denoisers(pipe)
        self._engine = engine
        self._undo = ExitStack()
        self._calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Tensor]] = []
        self._sums: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0])

    def __enter__(self) -> Taps:
        from ...strategies.stale.displaced import StaleSequence

        for model, hooks in zip(self._models, self._engine.hooks, strict=True):
            self._undo.callback(model.register_forward_hook(self._called, with_kwargs=True).remove)
            for handler in getattr(hooks.handler, "handlers", ()):
                if isinstance(handler, StaleSequence):
                    self._tap(handler)
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo.close()

    def _called(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        from torch import Tensor
        from torch.utils._pytree import tree_map_only

        from ...parts.part import whole_of

        def copied(tensor: Tensor) -> Tensor:
            return whole_of(tensor).detach().clone()

        # Some pipelines write their latents in place.
        self._calls.append((model, *tree_map_only(Tensor, copied, (args, kwargs)), copied(_first(output))))

    def _tap(self, handler: Any) -> None:
        from ...core.patching import Patch
        from ...strategies.sequence import SequenceParallel

        traffic = self._engine.mesh.traffic
        counted = traffic.bytes_sent

        def attend(key: Any, attention: AttentionCall) -> Tensor:
            control, out = handler.control, patch.original(key, attention)
            if control.decision.synchronous:
                return out
            # Ranks take turns where they would send, by when all of them have counted: what one puts back is
            # not missing for another.
            traffic.bytes_sent = Counter()
            try:
                exact = SequenceParallel.attend_distributed(handler, attention)
            finally:
                traffic.bytes_sent = counted
            _add(self._sums[key[1], control.clock.call.step], out, exact)
            return out

        patch = Patch(handler, "attend_stale", attend)
        self._undo.callback(patch)

    def attention_errors(self) -> dict[str, dict[int, float]]:
        """Relative L2 error by block and stale step of the attention's output, over all ranks, heads and branches."""
        errors: dict[str, dict[int, float]] = {}
        for (block, step), sums in self._sums.items():
            errors.setdefault(block, {})[step] = _relative(sums)
        return errors

    def same_latents(self, evaluations: int) -> list[float]:
        """For every evaluation the relative L2 error of what the transformer returned, on the very same inputs.

        Call it when the strategy is off: the exact transformer runs on all inputs again.
        """
        import torch

        per = max(1, len(self._calls) // max(1, evaluations))
        sums = [[0.0, 0.0] for _ in range(-(-len(self._calls) // per))]
        with torch.no_grad():
            for number, (model, args, kwargs, output) in enumerate(self._calls):
                _add(sums[number // per], output.float(), _first(model(*args, **kwargs)).float())
        return [_relative(each) for each in sums]


def token_errors(predictions: Sequence[Tensor], exact: Sequence[Tensor], images: int) -> list[list[list[float]]]:
    """The prediction's error by place in the image, for every evaluation: (evaluations, rows, columns).

    Args:
        predictions, exact: of every evaluation, (n, C, h, w), (n, C, frames, h, w), or packed tokens (n, S, C), which
            are taken for a square where S is one, and for a single column otherwise.
        images: of the first so many rows.

    Returns:
        The root mean square error of every place over images, channels and frames, over that of what is exact of the
        whole image, so that its root mean square over all places is the relative error of the step. Four digits.
    """
    errors = []
    for ours, truth in zip(predictions, exact, strict=True):
        apart, power = ((ours - truth)[:images].float().square(), truth[:images].float().square())
        if apart.ndim == 3:
            side = isqrt(apart.shape[1])
            shape = (side, side) if side * side == apart.shape[1] else (apart.shape[1], 1)
            places = apart.mean((0, 2)).view(shape)
        else:
            places = apart.mean([dim for dim in range(apart.ndim) if dim < apart.ndim - 2])
        relative = (places / power.mean().clamp_min(1e-30)).sqrt()
        errors.append([[float(f"{value:.4g}") for value in row] for row in relative.tolist()])
    return errors


def _add(sums: list[float], ours: Tensor, exact: Tensor) -> None:
    sums[0] += float((ours - exact).float().square().sum())
    sums[1] += float(exact.float().square().sum())


def _relative(sums: list[float]) -> float:
    return (sums[0] / max(sums[1], 1e-30)) ** 0.5


def _first(output: Any) -> Tensor:
    return output if hasattr(output, "norm") else output[0]


def nearest_matches_prompt(model: Path, cell: Cell, images: np.ndarray) -> list[bool] | None:
    """For every image, whether the nearest training image is that of its prompt; None: unknown.

    Known of the embedded models with training images in their folders, for prompts that are captions.
    """
    if images.ndim != 4 or zoo.embedded(model) is None or not (model / "thumbnails.png").exists():
        return None
    from .references import nearest, read_references, read_sheet, shrink

    entries = json.loads((model / "captions.json").read_text(encoding="utf-8"))
    generated = eight_bits(images)
    if cell.labels:
        references = read_references(model, len(entries), generated.shape[1])
        views = references.reshape(-1, *references.shape[2:])
        numbers, asked = nearest(shrink(generated, references.shape[2]), views) // references.shape[1], cell.labels
    else:
        captions = {name: place for place, entry in enumerate(entries) for name in (entry["caption"], *entry["also"])}
        if not captions.keys() >= set(cell.prompts):
            return None
        numbers = nearest(shrink(generated), read_sheet(model / "thumbnails.png", len(entries)))
        asked = [captions[prompt] for prompt in cell.prompts]
    return [bool(number == wanted) for number, wanted in zip(numbers, asked, strict=True)]


# --------------------------------------------------------------------------------------------------
# On real ranks


def generate_on_ranks(setup: Setup, cell: Cell, backend: str | None) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """The images of real ranks, and for every rank its seconds, those in collectives, and bytes sent by axis."""
    from ...launch import launcher

    with launcher(backend, cell.devices, setup.device, threads=1) as pool:
        results = pool.run(rank_of_cell, setup, cell)
    return results[0][0], [times for _, times in results]


def rank_of_cell(setup: Setup, cell: Cell) -> tuple[np.ndarray | None, dict[str, Any]]:
    """Generate the cell's images on one rank twice, and time the second run."""
    import torch.distributed as dist

    from ...engine import engine_of, parallelize, restore

    pipe = load_study_pipeline(setup)
    set_sampler(pipe, cell.sampler, pipe.scheduler)
    parallelize(pipe, cell.config())
    try:
        run_cell(pipe, setup, cell)
        images, times = timed_request(pipe, setup, cell, engine_of(pipe).mesh)
    finally:
        restore(pipe)
    return (images if dist.get_rank() == 0 else None), times


def timed_request(pipe: Any, setup: Setup, cell: Cell, mesh: Any) -> tuple[np.ndarray, dict[str, Any]]:
    """The images of a request on real ranks, and this rank's seconds and bytes, in all and by step.

    A step ends where the sampler is given its prediction; the last one does not hold the decoder. ``work_processor`` is
    the processor time of this thread outside of collectives, which other processes on the machine hardly change.
    """
    import torch.distributed as dist

    with _collectives_timed() as spent:
        dist.barrier()
        mesh.traffic.reset()
        marks = [_Mark.now(spent)]
        images, _ = run_cell(pipe, setup, cell, on_step=lambda: marks.append(_Mark.now(spent)))
        total = time.perf_counter() - marks[0].seconds
    sent = dict(mesh.traffic.bytes_sent)
    steps = [
        {
            "seconds": after.seconds - before.seconds,
            "in_collectives": after.inside - before.inside,
            "work_processor": after.busy - before.busy,
        }
        for before, after in pairwise(marks)
    ]
    times = {"seconds": total, "in_collectives": sum(each for each, _ in spent), "bytes_sent": sum(sent.values())}
    return images, times | {"sent": sent, "steps": steps}


class _Mark(NamedTuple):
    """Seconds by the clock, of them inside collectives, and this thread's processor seconds outside of them."""

    seconds: float
    inside: float
    busy: float

    @classmethod
    def now(cls, spent: Sequence[tuple[float, float]]) -> _Mark:
        inside, busy = (sum(each) for each in zip(*spent, strict=True)) if spent else (0.0, 0.0)
        return cls(time.perf_counter(), inside, time.thread_time() - busy)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use the ranks' number of threads, because kernels may round differently with more."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _collectives_timed() -> Iterator[list[tuple[float, float]]]:
    """Seconds of every operation of a link, by the clock and of this thread: sending, and waiting for other ranks."""
    from ...comm import Link, Transfer

    spent: list[tuple[float, float]] = []
    inside = False

    def timed(inner: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:
                return inner(*args, **kwargs)
            inside, began, busy = True, time.perf_counter(), time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                inside = False
                spent.append((time.perf_counter() - began, time.thread_time() - busy))

        return run

    moves = ("all_to_all", "all_gather", "all_gather_list", "all_reduce", "shift", "send", "receive", "broadcast")
    moves += ("all_to_all_packed", "all_gather_async", "all_reduce_async")
    with ExitStack() as undo:
        for owner, name in (*((Link, name) for name in moves), (Transfer, "wait")):
            inner = getattr(owner, name)
            setattr(owner, name, timed(inner))
            undo.callback(setattr, owner, name, inner)
        yield spent
