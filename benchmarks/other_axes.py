"""Two ways to use several devices that are no strategy here: a window of steps at a time, and patches whose cut turns.

    nice python benchmarks/other_axes.py                        # 4 images of each; 20 minutes of one core

*window*: N devices predict N steps that follow one another, from guesses of their latents; the sampler runs over these
predictions, which makes better guesses, and the window moves on over its first step and those whose guess has changed
by less than a tolerance (Picard iteration, Shih et al. 2023, arXiv:2305.16317; another iteration over steps is
parareal, Selvam et al. 2024, arXiv:2412.08292). In a round each device sends its prediction to the others.

*turning*: naive patches, which see nothing of one another in a step, cut along rows and columns in turn (the idea of
latent parallelism, arXiv:2512.07350, without overlapping borders), beside naive and displaced patches.

Devices are simulated, and images compared with the sequential one of their caption and seed. A row is added to
``--file`` as soon as it is measured, and rows that are there are not measured again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial, wraps
from itertools import chain, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch

from harness import add_missing, command_line
from quality import setup_of

MODELS, DEVICES, IMAGES = ("emoji-flux", "emoji-sd3", "emoji-dit-s"), (2, 4, 8), 4
# A window with the largest change of a guess, of the latents' size, over which it moves on.
WINDOWS, PATCHES = ("window 0.1", "window 0.01"), ("naive", "turning", "displaced+linear")
# Steps, models, devices and ways, in the order they are measured; emoji-dit-l is twice as deep as emoji-dit-s.
PASSES: tuple[tuple[Any, Any, Any, Any], ...] = (
    ((12,), MODELS, DEVICES, (*WINDOWS, *PATCHES)),
    ((28,), MODELS, DEVICES, WINDOWS[:1]),
    ((12,), ("emoji-dit-l",), DEVICES, PATCHES[2:]),
    ((50,), MODELS, DEVICES, WINDOWS[:1]),
    ((28, 50), MODELS, DEVICES, WINDOWS[1:]),
)
# By family: modules behind which image tokens get another order, and the one behind which they have their own again.
ORDERED = {"DiT": ("pos_embed", "proj_out_2"), "SD3": ("pos_embed", "proj_out"), "Flux": ("x_embedder", "proj_out")}


class Window:
    """Makes a pipeline visit the steps of a window in rounds, and counts these, and bytes (``sent``)."""

    def __init__(self, scheduler: Any, devices: int, tolerance: float) -> None:
        self._scheduler, self._devices, self._tolerance = scheduler, devices, tolerance
        self._own = scheduler.set_timesteps, scheduler.step
        # Pipelines look at the arguments that these take.
        scheduler.set_timesteps = wraps(self._own[0])(partial(self._begin))
        scheduler.step = wraps(self._own[1])(partial(self._step))

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *_: Any) -> None:
        del self._scheduler.set_timesteps, self._scheduler.step

    def _begin(self, *args: Any, **kwargs: Any) -> None:
        self._own[0](*args, **kwargs)
        self._times, self._scheduler.timesteps = self._scheduler.timesteps, self
        self._first, self._guesses, self._found, self.rounds, self.sent = 0, list[Any](), list[Any](), 0, 0

    def __len__(self) -> int:
        return len(self._times)

    def __iter__(self) -> Iterator[Any]:
        while self._first < len(self):
            yield self._times[self._first + len(self._found)]

    def _sampled(self, prediction: Any, number: int, latents: Any) -> Any:
        # Of a sampler that counts its steps.
        self._scheduler._step_index = number
        return self._own[1](prediction, self._times[number], latents, return_dict=False)[0]

    def _step(self, prediction: Any, timestep: Any, sample: Any, return_dict: bool = True, **_: Any) -> Any:
        if not self._guesses:
            self._guesses = [sample] * self._devices
        self._found.append(prediction)
        if len(self._found) == min(self._devices, len(self) - self._first):
            self._round()
        latents = self._guesses[len(self._found)]
        return SimpleNamespace(prev_sample=latents) if return_dict else (latents,)

    def _round(self) -> None:
        width, made = len(self._found), self._guesses[:1]
        for number, prediction in enumerate(self._found):
            made.append(self._sampled(prediction, self._first + number, made[-1]))
        done = 1
        while done < width and float((made[done] - self._guesses[done]).norm() / made[done].norm()) <= self._tolerance:
            done += 1
        self._first, self._guesses = self._first + done, made[done:]
        # Steps that are new in the window: with the last prediction.
        while (number := self._first + len(self._guesses) - 1) < len(self) and len(self._guesses) < self._devices:
            self._guesses.append(self._sampled(self._found[-1], number, self._guesses[-1]))
        self.rounds, self.sent = self.rounds + 1, self.sent + width * (self._devices - 1) * made[0][0].nbytes
        self._found = []


@contextmanager
def turning(model: Any, turned: list[Any]) -> Iterator[None]:
    """While ``turned`` has an odd length, the image tokens of all blocks lie column by column."""
    first, last = next(names for family, names in ORDERED.items() if type(model).__name__.startswith(family))

    def ordered(back: bool, text: int = 0) -> Any:
        def hook(module: Any, args: Any, tokens: Any) -> Any:
            if len(turned) % 2 == 0:
                return None
            if isinstance(tokens, tuple):
                return tuple(hook(module, args, each[None])[0] for each in tokens)
            count = tokens.shape[1] - text
            side = int(count**0.5)
            order = torch.arange(count).view(side, side).T.flatten()
            order = torch.cat([torch.arange(text), text + (order.argsort() if back else order)])
            return tokens[:, order]

        return hook

    with ExitStack() as undo:
        undo.callback(getattr(model, first).register_forward_hook(ordered(False)).remove)
        undo.callback(getattr(model, last).register_forward_hook(ordered(True)).remove)
        if first == "x_embedder":
            # Rotations of text and image.
            undo.callback(model.pos_embed.register_forward_hook(ordered(False, text=16)).remove)
        yield


@cache
def pipeline(model: str) -> tuple[Any, Any]:
    """A model's pipeline with its sampler, and a cell of a study with its images."""
    from ditmesh import zoo
    from ditmesh.generate.job import class_numbers
    from ditmesh.generate.model_info import find_model
    from ditmesh.lab.study.plan import Cell
    from ditmesh.lab.study.running import load_study_pipeline
    from ditmesh.lab.study.samplers import set_sampler

    folder, captions = zoo.path(model), zoo.captions(model)
    prompts = tuple(captions[(2 * at + 1) * len(captions) // (2 * IMAGES)] for at in range(IMAGES))
    labels, pipe = class_numbers(prompts, find_model(folder)), load_study_pipeline(setup_of(folder, model, model, 1))
    set_sampler(pipe, sampler := "ddim" if labels else "euler", pipe.scheduler)
    return pipe, Cell(sampler, prompts, tuple(range(IMAGES)), tuple(labels))


def drawn(model: str, steps: int, cell: Any, on_step: Any = None) -> Any:
    """Images of a cell."""
    from ditmesh import zoo
    from ditmesh.lab.study.running import run_cell

    return run_cell(pipeline(model)[0], setup_of(zoo.path(model), model, model, steps), cell, on_step)[0]


# Of the sequential loop on one device.
exact = cache(drawn)


def measured(steps: int, model: str, devices: int, way: str) -> dict[str, Any]:
    """Decibels of every image (None: equal), bytes of all devices for one; of windows for every image, with rounds."""
    from ditmesh.lab.study.running import distances, stale

    def decibels(images: Any, of: Any) -> list[float | None]:
        pairs = zip(images, exact(model, steps, of), strict=True)
        return [apart and round(apart, 2) for apart in (distances([pair])["psnr"] for pair in pairs)]

    pipe, cell = pipeline(model)
    if way in PATCHES:
        exact(model, steps, cell)
        turned, kind = list[Any](), "naive" if way == "turning" else way
        ours = replace(cell, strategy=kind, devices=devices, warmup="fixed(1)")
        with stale(pipe, ours) as engine, turning(pipe.transformer, turned if way == "turning" else []):
            images = drawn(model, steps, ours, lambda: turned.append(None))
            sent = sum(engine.mesh.traffic.bytes_sent.values()) // IMAGES
        return {"psnr": decibels(images, cell), "sent": sent}
    found = list[Any]()
    for at in range(IMAGES):
        one = replace(cell, prompts=cell.prompts[at:][:1], seeds=(at,), labels=cell.labels[at:][:1])
        exact(model, steps, one)
        with Window(pipe.scheduler, devices, float(way.split()[1])) as window:
            images = drawn(model, steps, one)
        found.append((*decibels(images, one), window.rounds, window.sent))
    return dict(zip(("psnr", "rounds", "sent"), map(list, zip(*found, strict=True)), strict=True))


def main() -> None:
    """Measure what is missing."""
    parser = command_line(__doc__, figures=False)
    parser.add_argument("--file", type=Path, default=Path(__file__).parent / "measured" / "other-axes.jsonl")
    options = parser.parse_args()
    torch.set_num_threads(1)
    values = chain.from_iterable(product(*some) for some in PASSES)
    rows = (dict(zip(("steps", "model", "devices", "way"), each, strict=True)) for each in values)
    add_missing(options.file, ((row, partial(measured, **row)) for row in rows))


if __name__ == "__main__":
    main()
