"""Steps of schedulers as they are told to those who watch them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AnyFlowFARPipeline  # pyright: ignore[reportPrivateImportUsage]
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

from ditmesh import InputError, ParallelConfig, zoo
from ditmesh.generate.job import Generated, StepDone, job_for
from ditmesh.generate.model_info import find_model
from ditmesh.generate.run import generate
from ditmesh.generate.steps import SchedulerStep, StepEvents
from ditmesh.generate.video import frames_digest
from ditmesh.media.videos import read_frames
from ditmesh.request import PictureRequest
from ditmesh.serve.worker.previews import estimated_image
from support.exam import EXAMS
from support.tiny import save_tiny_anyflow


def test_listeners_hear_of_every_step_until_they_are_taken_off():
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(3)
    heard: list[SchedulerStep] = []
    counted: list[int | None] = []
    first = StepEvents(scheduler, heard.append)
    second = StepEvents(scheduler, lambda step: counted.append(step.index))
    sample = torch.zeros(1, 4, 2, 2)
    for time in scheduler.timesteps:
        # By position and by name, as pipelines do.
        sample = scheduler.step(torch.ones_like(sample), time, sample=sample, return_dict=False)[0]
    assert counted == [0, 1, 2]
    assert heard[-1].latents() is sample
    estimates = [estimated_image(step) for step in heard]
    # A straight path points to one place from everywhere.
    assert all(one is not None and torch.allclose(one, sample) for one in estimates)
    second.undo()
    first.undo()
    assert "step" not in vars(scheduler)


@pytest.mark.parametrize(("scheduler", "steps"), [(None, 3), ("FlowMatchHeunDiscreteScheduler", 5)])
def test_progress_ends_where_the_schedule_does(scheduler: str | None, steps: int, tmp_path: Path):
    info = find_model(zoo.path())
    job = job_for(info, PictureRequest(prompt="a red fox", steps=3), tmp_path, scheduler=scheduler, check_memory=False)
    said: list[object] = []
    generate(job, report=said.append)  # type: ignore[arg-type]
    done = [one for one in said if isinstance(one, StepDone)]
    assert (sum(one.steps for one in done), {one.of for one in done}) == (steps, {steps})


def in_chunks(folder: Path, out: Path, config: ParallelConfig) -> tuple[list[list[int]], list[str]]:
    """After every step how many frames the file of each part has; digests, the first of what diffusers makes."""
    asked = {"width": 32, "height": 32, "num_frames": 17, "num_inference_steps": 3, "guidance_scale": 3.0}
    asked["max_sequence_length"] = 16
    pipe = AnyFlowFARPipeline.from_pretrained(folder)
    frames = pipe("a fox", **asked, generator=[torch.Generator().manual_seed(5)], output_type="pil").frames[0]
    request = PictureRequest(prompt="a fox", width=32, height=32, steps=3, guidance=3.0, seed=5)
    parts, digests = list[list[int]](), [frames_digest(frames)]

    def report(message: object) -> None:
        if isinstance(message, StepDone):
            parts.append([len(read_frames(file, file.name)) for file in sorted(out.glob("*.part?.mp4"))])
            assert message.of == 9
        elif isinstance(message, Generated):
            digests.append(str(message.receipt.frames_digest))

    job = job_for(find_model(folder), request, out, config=config, check_memory=False, max_sequence_length=16)
    generate(job, report=report)  # type: ignore[arg-type]
    return parts, digests


CASES = [
    pytest.param(False, {}, id="one"),
    pytest.param(True, {"ulysses": 2}, id="two"),
    pytest.param(True, {"ulysses": 2, "vae": "bands"}, id="bands", marks=pytest.mark.matrix),
    pytest.param(False, {"ulysses": 2}, id="emoji-two", marks=pytest.mark.matrix),
    pytest.param(False, {"ring": 2, "exchange": "gather"}, id="emoji-gather", marks=pytest.mark.matrix),
]


@pytest.mark.parametrize(("tiny", "config"), CASES)
def test_frames_are_written_chunk_by_chunk(ranks, tiny: bool, config: dict[str, Any], tmp_path: Path):
    (out := tmp_path / "out").mkdir()
    folder = save_tiny_anyflow(tmp_path) if tiny else zoo.path("emoji-anyflow")
    given = folder, out, ParallelConfig(**config)
    with pytest.raises(InputError, match=r"frames 9: AnyFlowFARPipeline makes 17, in chunks of 1\+2\+2; use 17"):
        find_model(folder).check_frames(9)
    parts, digests = ranks(2).run(in_chunks, *given)[0] if config else in_chunks(*given)
    # The first part is there before the second chunk begins.
    assert parts == [[]] * 2 + [[1]] * 3 + [[1, 8]] * 3 + [[1, 8, 8]]
    assert digests[0] == digests[1]
    assert [file.suffixes for file in out.iterdir()] == [[".mp4"]]


def test_a_copied_scheduler_takes_its_own_steps():
    """Pipelines of video with sound copy their scheduler, and what is patched on it stays behind."""
    exam = EXAMS["LTX2Pipeline"]
    pipe = exam.make()
    pipe.set_progress_bar_config(disable=True)
    truth = pipe(**exam.call([1]))
    heard: list[SchedulerStep] = []
    events = StepEvents(pipe.scheduler, heard.append)
    found = pipe(**exam.call([1]))
    events.undo()
    assert len(heard) == exam.call([1])["num_inference_steps"]
    for one, other in zip(found[:2], truth[:2], strict=True):
        assert torch.equal(one, other)
