"""A field of a request is declared in one place, from which every front end has it."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from ditmesh import InputError
from ditmesh.cli.options import PictureOptions
from ditmesh.cli.values import picture_job
from ditmesh.config import ParallelConfig
from ditmesh.core.files import digest_of_file
from ditmesh.generate.files import InputFile
from ditmesh.generate.job import job_for
from ditmesh.generate.model_info import find_model
from ditmesh.generate.outputs import Picture, VideoFrames
from ditmesh.generate.receipt import Receipt
from ditmesh.generate.replay import changes_of, job_of
from ditmesh.generate.runner import PipelineRunner, Prepared
from ditmesh.request import FieldError, PictureRequest, option_of, request_fields
from ditmesh.serve.http.bodies import validated
from ditmesh.serve.http.openai import ImageRequest
from ditmesh.serve.offers import ModelSpec
from ditmesh.serve.types import JobRequest
from ditmesh.serve.worker.loaded import LoadedModel
from ditmesh.serve.worker.protocol import Start


def test_what_is_wrong_with_a_field_is_spelt_by_its_front_end():
    error = FieldError("frames", "{frames} {:g}: {} generates images; leave {frames} out, or {ip-image}", 5, "{n}")
    assert str(error) == "--frames 5: {n} generates images; leave --frames out, or --ip-image"
    assert error.spelled(lambda name: name) == "frames 5: {n} generates images; leave frames out, or ip-image"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert [option_of(name) for name in ("n", "negative_prompt", "width")] == ["--num-images", "--negative", "--size"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"frames": 5000}, "--frames 5000: input should be less than or equal to 4096"),
        ({"n": 0}, "--num-images 0: "),
        ({"guidance": float("nan")}, "--guidance nan: input should be a finite number"),
        ({"strength": 2.0}, "--strength 2.0: "),
        ({"negative_prompt": "\ud83e"}, "the negative prompt is not Unicode: character 1 is"),
    ],
)
def test_fields_out_of_bounds_are_refused_in_a_sentence(given, says):
    with pytest.raises(InputError) as refused:
        PictureRequest.read(**given)
    assert str(refused.value).startswith(says)


# ---- every field, from the request to the pipeline


def pipeline(**more: Any) -> type[Any]:
    """A class of pipelines whose call takes what every request can say, and ``more``."""
    common = {"prompt": None, "negative_prompt": None, "num_inference_steps": 50, "guidance_scale": 1.0}
    common |= {"width": 8, "height": 8, "generator": None, **more}

    def call() -> None: ...

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, keyword, default=value) for name, value in common.items()]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return type("Pipeline", (), {"__call__": call})


Images = pipeline(num_images_per_prompt=1, max_sequence_length=512, image=None, strength=0.6)
Videos = pipeline(num_videos_per_prompt=1, num_frames=1, frame_rate=3)
BASE = {
    "prompt": "a red fox",
    "negative_prompt": "blue",
    "width": 32,
    "height": 48,
    "steps": 4,
    "guidance": 5.0,
    "seed": 3,
}
# Another value of each field, and the arguments of the pipeline's call that have to change with it, alone.
CHANGED: dict[str, tuple[Any, dict[str, Any]]] = {
    "prompt": ("a cactus", {"prompt": "a cactus"}),
    "negative_prompt": ("grey", {"negative_prompt": "grey"}),
    "width": (64, {"width": 64}),
    "height": (32, {"height": 32}),
    "steps": (7, {"num_inference_steps": 7}),
    "guidance": (2.5, {"guidance_scale": 2.5}),
    "strength": (0.25, {"strength": 0.25}),
    "seed": (11, {"generator": [11]}),
    "frames": (9, {"num_frames": 9}),
    "fps": (12, {"frame_rate": 12}),
}
VIDEO_FIELDS = ("frames", "fps")


def asked(name: str, image: Path) -> tuple[str, dict[str, Any], tuple[InputFile, ...]]:
    """The model, the fields and the input files of a request in which a field may be set."""
    if name in VIDEO_FIELDS:
        return "emoji-wan", {**BASE, "height": 32, "frames": 5, "fps": 8}, ()
    if name in ("strength", "inputs"):
        return "emoji-sd3", {**BASE, "strength": 0.5}, (InputFile("image", str(image), digest_of_file(image)),)
    return "emoji-sd3", dict(BASE), ()


def call_of(prepared: Prepared) -> dict[str, Any]:
    """The arguments of the call, seeds in the place of generators, and what stands for an image and the adapters."""
    found = {**prepared.arguments, "generator": [one.initial_seed() for one in prepared.arguments["generator"]]}
    if "image" in found:
        found["image"] = found["image"].getpixel((0, 0))
    return {**found, "adapters": prepared.adapters}


def receipt_of(runner: PipelineRunner, job: Any) -> Receipt:
    """The receipt of the job's first image or video, as it is read from its file."""
    frames = [Image.new("RGB", job.size, (40, 50, 60))] * (job.frames or 1)
    made = VideoFrames(frames) if job.frames else Picture(frames[0])
    receipt = runner.receipt(runner.prepare(job), 0, made)
    receipt = receipt.model_copy(update={"frames_digest": None})
    return Receipt.model_validate_json(receipt.model_dump_json())


@pytest.fixture
def image(tmp_path: Path) -> Path:
    Image.new("RGB", (32, 48), (10, 20, 30)).save(tmp_path / "image.png")
    return tmp_path / "image.png"


@pytest.mark.parametrize("name", [name for name in PictureRequest.model_fields if name != "n"])
def test_every_field_reaches_the_pipeline_and_comes_back_from_the_receipt(name: str, image: Path):
    model, fields, files = asked(name, image)
    value, expected = CHANGED[name]
    info, runner = find_model(model), PipelineRunner(None, kind=Videos if name in VIDEO_FIELDS else Images)
    runner.facts = {"device": "cpu", "devices": 1, "seconds": 1.0, "config": ParallelConfig().recorded()}
    runner.facts |= {"environment": {"torch": "2"}, "weights_digest": "a"}
    jobs = [
        job_for(info, PictureRequest(**given), "", files=files, config=ParallelConfig())
        for given in (fields, {**fields, name: value})
    ]
    plain, changed = (call_of(runner.prepare(job)) for job in jobs)
    assert changed == {**plain, **expected} != plain
    before, receipt = (receipt_of(runner, job) for job in jobs)
    again = job_of(receipt, info, ParallelConfig(), "", 60.0)
    assert call_of(runner.prepare(again)) == changed
    named = {"width": "size", "height": "size", "fps": "frames per second"}.get(name, name.replace("_", " "))
    assert [one.what for one in changes_of(before, receipt)] == [named]


# A size is width and height.
@pytest.mark.parametrize("name", [name for name in JobRequest.model_fields if name != "size"])
def test_every_field_of_a_servers_job_reaches_the_pipeline(name: str, image: Path):
    """Through the body of a request; the fields that are the server's own change no argument."""
    other = image.with_name("other.png")
    Image.new("RGB", (32, 48), (90, 0, 0)).save(other)
    own = {"model": "", "n": 3, "priority": 2, "deadline_ms": 500, "previews": 2, "format": "jpeg"}
    given = {
        "loras": ([{"name": "oil", "scale": 0.5}], {"adapters": (("lora1", 0.5),)}),
        "inputs": ([{"role": "image", "digest": digest_of_file(other)}], {"image": (90, 0, 0)}),
        **{field: (value, {}) for field, value in own.items()},
        **{field: (value, expected) for field, (value, expected) in CHANGED.items()},
    }
    value, expected = given[name]
    path, fields, files = asked(name, image)
    if files:
        fields["inputs"] = [{"role": "image", "digest": files[0].digest}]
    model = LoadedModel(
        ModelSpec("m", path, ParallelConfig()), torch.device("cpu"), SimpleNamespace(deadline=None, size=1)
    )
    model.kind = model.info.pipeline_class
    model.card = {"pipeline": model.kind, "video": name in VIDEO_FIELDS}
    model.batcher = SimpleNamespace(why="alone", delegates=False, engine=SimpleNamespace(config=ParallelConfig()))
    model.spec.loras.update({"ink": "", "oil": ""})
    model._files = (InputFile("lora", "ink", "2" * 64), InputFile("lora", "oil", "3" * 64))
    runner = PipelineRunner(None, kind=Videos if name in VIDEO_FIELDS else Images)
    model._runners = dict.fromkeys((model.kind, "StableDiffusion3Img2ImgPipeline"), (runner, runner))
    digests = {digest_of_file(path): str(path) for path in (image, other)}

    def call(body: dict[str, Any]) -> dict[str, Any]:
        return call_of(model.prepare(Start("job/1", validated(JobRequest, body), 1, digests)))

    plain, changed = call(fields), call({**fields, name: value})
    # The task is that of the job's image 1.
    if name == "seed":
        expected = {"generator": [value + 1]}
    assert changed == {**plain, **expected}
    assert (changed != plain) == (name not in own)


@pytest.mark.parametrize("name", [*PictureRequest.model_fields, "loras", "priority", "deadline_ms", "format"])
def test_every_field_of_the_images_api_is_one_of_the_job(name: str):
    """In OpenAI's form; width and height are its size, and videos and edits have bodies of their own."""
    values = {"n": 2, "loras": [{"name": "oil", "scale": 0.5}], "priority": 2, "deadline_ms": 500, "format": "jpeg"}
    value = values.get(name, CHANGED.get(name, (None,))[0])
    known = {"guidance": "guidance_scale", "format": "output_format"}
    body: dict[str, Any] = {"prompt": "a red fox", known.get(name, name): value}
    if name in ("width", "height"):
        body = {"prompt": "a red fox", "size": "64x32"}
    asked = ImageRequest.model_validate(body)
    expected = JobRequest.model_validate({"prompt": "a red fox", name: value})
    assert getattr(asked, name) == getattr(expected, name)


def options_of(fields: dict[str, Any]) -> PictureOptions:
    """The command's options for fields of a request."""
    known = {request_fields()[name].option: value for name, value in fields.items() if request_fields()[name].flags}
    return PictureOptions(**known | {"size": f"{fields['width']}x{fields['height']}"})


@pytest.mark.parametrize("name", list(PictureRequest.model_fields))
def test_every_option_of_the_command_reaches_the_pipeline(name: str, image: Path):
    model, fields, files = asked(name, image)
    value, expected = (2, {"num_images_per_prompt": 2, "generator": [3, 4]}) if name == "n" else CHANGED[name]
    runner = PipelineRunner(None, kind=Videos if name in VIDEO_FIELDS else Images)

    def call(given: dict[str, Any]) -> dict[str, Any]:
        more = {"strength": given.get("strength"), "files": files}
        job, _ = picture_job(model, [given["prompt"]], options_of(given), 60.0, "", **more)
        return call_of(runner.prepare(job))

    plain = call(fields)
    assert call({**fields, name: value}) == {**plain, **expected} != plain


def test_a_value_of_zero_is_a_value():
    runner = PipelineRunner(None, kind=Images)
    job = job_for(find_model("emoji-sd3"), PictureRequest(**{**BASE, "guidance": 0.0, "negative_prompt": ""}), "")
    arguments = runner.prepare(job).arguments
    assert (arguments["guidance_scale"], arguments["negative_prompt"]) == (0.0, "")


def test_image_i_has_seed_plus_i():
    """Of every prompt and in every call; its receipt says so, and torch's own generators begin at that of the first."""
    runner = PipelineRunner(None, kind=Images)
    runner.facts = {"device": "cpu", "devices": 1, "seconds": 1.0, "config": ParallelConfig().recorded()}
    job = job_for(find_model("emoji-sd3"), PictureRequest(**BASE, n=5), "", ("a fox", "a cactus"), per_call=2)
    seeds, recorded, prompts = [], [], []
    made = Picture(Image.new("RGB", (32, 48)))
    for number in range(job.calls):
        prepared = runner.prepare(job, number)
        generators = [one.initial_seed() for one in prepared.arguments["generator"]]
        assert prepared.seed == generators[0]
        assert prepared.arguments["num_images_per_prompt"] == len(generators)
        receipts = [runner.receipt(prepared, place, made) for place in range(len(generators))]
        recorded += [(receipt.index, receipt.seed) for receipt in receipts]
        prompts += [prepared.arguments["prompt"]] * len(generators)
        seeds += generators
    assert seeds == list(range(3, 13))
    assert recorded == list(enumerate(seeds))
    assert prompts == ["a fox"] * 5 + ["a cactus"] * 5


def test_an_edit_takes_the_steps_of_its_strength(image: Path):
    runner = PipelineRunner(None, kind=Images)
    files = (InputFile("image", str(image), digest_of_file(image)),)
    for strength, steps in ((None, 4), (0.5, 4), (0.01, 1), (1.0, 8)):
        request = PictureRequest(**{**BASE, "steps": 8, "strength": strength})
        assert runner.prepare(job_for(find_model("emoji-sd3"), request, "", files=files)).steps == steps
