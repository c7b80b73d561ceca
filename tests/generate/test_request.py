"""A field of a request is declared in one place, from which every front end has it."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from ditmesh import InputError
from ditmesh.request import FieldError, PictureRequest, option_of

# What a package outside of ditmesh declares, before it imports the rest.
DECLARED = """
from typing import Annotated

from pydantic import Field

from ditmesh import request
from ditmesh.request import RequestField, Widget


class Wider(request.PictureRequest):
    eta: Annotated[
        float | None,
        RequestField(
            "Set how much noise a step adds.",
            ("--eta",),
            images="eta",
            argument="eta",
            widget=Widget("eta", -1.0, "-1: the model's own.", -1.0, 1.0, 0.01),
        ),
    ] = Field(default=None, ge=0, le=1)


request.PictureRequest = Wider
"""
SEEN = """
import inspect
import sys
from unittest.mock import MagicMock

from PIL import Image

from ditmesh.cli.options import PictureOptions
from ditmesh.config import ParallelConfig
from ditmesh.errors import InputError
from ditmesh.generate.job import PictureJob, job_for
from ditmesh.generate.model_info import find_model
from ditmesh.generate.receipt import Receipt
from ditmesh.generate.replay import changes_of, job_of
from ditmesh.generate.arguments import check_call
from ditmesh.generate.outputs import Picture
from ditmesh.generate.runner import PipelineRunner
from ditmesh.request import FieldError
from ditmesh.serve.http.intake import JobBody
from ditmesh.serve.http.openai import ImageRequest
from ditmesh.serve.types import JobRequest, ModelCard

# What nodes import of ComfyUI.
for name in ("comfy", "comfy.model_management", "comfy.utils", "comfy.cli_args", "folder_paths", "latent_preview"):
    sys.modules[name] = MagicMock()
from integrations.comfyui.nodes import SetSampling

# The command line.
assert PictureOptions(eta=0.5).fields()["eta"] == 0.5
try:
    request.PictureRequest.read(eta=3)
except FieldError as error:
    assert str(error) == "--eta 3 is not possible; use 0 to 1", error
    assert error.spelled(str.upper) == "ETA 3 is not possible; use 0 to 1"

# The APIs.
assert JobBody(prompt="a", eta=0.5).eta == JobRequest(prompt="a", eta=0.5).eta == 0.5
card = ModelCard(id="m", created=0, pipeline="P")
assert ImageRequest(prompt="a", eta=0.5).fields(card)["eta"] == 0.5
assert "eta" in ImageRequest.model_json_schema()["properties"]

# ComfyUI.
kind, options = SetSampling.INPUT_TYPES()["optional"]["eta"]
assert (kind, options["default"], options["max"]) == ("FLOAT", -1.0, 1.0)
plain = {"seed": 0, "steps": 0, "guidance": -1.0, "width": 0, "height": 0, "images": 1}
assert SetSampling().set("the model's own", **plain, eta=0.25)[0]["eta"] == 0.25
assert "eta" not in SetSampling().set("the model's own", **plain, eta=-1.0)[0]


# A job, the pipeline's call, its receipt, and the job of that.
class WithEta:
    def __call__(self, prompt=None, num_inference_steps=4, eta=0.0, width=None, height=None): ...


info = find_model("emoji-sd3")
job = job_for(info, request.PictureRequest(prompt="a red fox", steps=4, eta=0.5), "out")
runner = PipelineRunner(None, kind=WithEta)
prepared = runner.prepare(job)
assert prepared.arguments["eta"] == 0.5
check_call(job, "WithEta", inspect.signature(WithEta.__call__).parameters)
try:
    check_call(job, "Without", {"prompt": None, "width": None, "height": None})
    raise AssertionError
except InputError as error:
    assert str(error) == "--eta 0.5: Without takes no eta; leave --eta out", error
runner.facts = {"device": "cpu", "devices": 1, "seconds": 1.0, "config": ParallelConfig().model_dump()}
receipt = runner.receipt(prepared, 0, Picture(Image.new("RGB", (32, 32))))
again = Receipt.model_validate_json(receipt.model_dump_json())
assert again.eta == 0.5
assert job_of(again, info, ParallelConfig(), "out", 60.0).eta == 0.5
assert "eta 0.5 -> 0.25" in [one.describe() for one in changes_of(receipt, receipt.model_copy(update={"eta": 0.25}))]
print("seen")
"""


def test_a_field_that_is_declared_outside_is_in_every_front_end():
    result = subprocess.run([sys.executable, "-c", DECLARED + SEEN], capture_output=True, text=True, timeout=300)
    assert result.stdout == "seen\n", result.stderr[-3000:]


def test_what_is_wrong_with_a_field_is_spelt_by_its_front_end():
    error = FieldError("frames", "{frames} {:g}: {} generates images; leave {frames} out, or {ip-image}", 5, "{n}")
    assert str(error) == "--frames 5: {n} generates images; leave --frames out, or --ip-image"
    assert error.spelled(lambda name: name) == "frames 5: {n} generates images; leave frames out, or ip-image"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert [option_of(name) for name in ("n", "negative_prompt", "width")] == ["--num-images", "--negative", "--size"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"steps": 0}, "--steps 0 is not possible; use 1 to 10000"),
        ({"frames": 5000}, "--frames 5000 is not possible; use 1 to 4096"),
        ({"n": 0}, "--num-images 0 is not possible; use 1 or more"),
        ({"guidance": float("nan")}, "guidance nan is not a number; use one such as --guidance 3.5"),
        ({"fps": 2000.0}, "--fps 2000 is not possible; use more than 0 and at most 1000"),
        ({"strength": 2.0}, "strength 2 is not possible; use more than 0 and at most 1"),
        ({"negative_prompt": "\ud83e"}, "the negative prompt is not Unicode: character 1 is"),
    ],
)
def test_fields_out_of_bounds_are_refused_in_a_sentence(given, says):
    with pytest.raises(InputError) as refused:
        PictureRequest.read(**given)
    assert str(refused.value).startswith(says)
