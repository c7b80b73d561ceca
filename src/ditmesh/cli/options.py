"""Options that several commands have, written once: `Annotated` types for their parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

PromptsFile = Annotated[Path | None, typer.Option("--prompts", metavar="FILE", help="More prompts, one a line.")]
Steps = Annotated[int | None, typer.Option(help="Denoising steps.", show_default="the pipeline's")]
Guidance = Annotated[float | None, typer.Option(help="Guidance scale.", show_default="the pipeline's")]
Negative = Annotated[str | None, typer.Option(help="What the pictures should not show.")]
Size = Annotated[
    str | None, typer.Option(metavar="WxH", help="Width and height in pixels.", show_default="the pipeline's")
]
Seed = Annotated[int, typer.Option(help="Seed of the first picture; picture i has seed + i.")]
NumImages = Annotated[int, typer.Option(help="Pictures per prompt.")]
DType = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option(help="Type of the weights.", show_default="float32 on the CPU, bfloat16 on CUDA"),
]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="What the ranks run on.")]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", help="How long a rank may wait for another one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
