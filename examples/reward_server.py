"""uvicorn --app-dir examples reward_server:app --port 9000

A reward as a server: for `function: http://127.0.0.1:9000/` in a run's rewards. It rates how dark images are. Put a
model of yours in the place of `score`.
"""

import base64
from io import BytesIO
from typing import Any

import numpy as np
from fastapi import FastAPI, HTTPException
from PIL import Image
from pydantic import BaseModel

app = FastAPI()


class Batch(BaseModel):
    """Images are PNG files in base64; a video is a list of them."""

    prompts: list[str]
    images: list[str | list[str]]
    arguments: dict[str, Any] = {}


def score(frames: list[np.ndarray], prompt: str) -> float:
    """The share of black in the frames (H, W, 3) of an image or video."""
    return 1.0 - float(np.mean([frame.mean() for frame in frames])) / 255.0


@app.post("/")
def rate(batch: Batch) -> dict[str, list[float]]:
    """A status from 400 to 499 ends the run with its text; one from 500 is asked again."""
    if len(batch.prompts) != len(batch.images):
        raise HTTPException(422, f"{len(batch.prompts)} prompts for {len(batch.images)} images")
    files = [[video] if isinstance(video, str) else video for video in batch.images]
    frames = [[np.asarray(Image.open(BytesIO(base64.b64decode(file)))) for file in video] for video in files]
    return {"scores": [score(*pair) for pair in zip(frames, batch.prompts, strict=True)]}
