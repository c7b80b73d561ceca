"""What a rank of ``ditmesh generate`` holds and reads of a transformer with ``--tensor`` or ``--pipe``.

A pipeline with random weights is made in a temporary folder; the function that the command runs on its ranks runs on
ranks that are watched: their private memory every few milliseconds, and what they take from the files of weights.
``--whole`` loads the transformer whole on every rank and then cuts it, to compare with.

    python benchmarks/big_model.py --megabytes 1000 --config tensor=2 --json figures.json
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))

import torch

from ditmesh.config import ParallelConfig
from harness import command_line, write_figures
from machine import describe_machine

WIDTH, BLOCKS = 1024, 8


def make(
    folder: Path, megabytes: float, blocks: int = BLOCKS, latent: int = 8, dtype: torch.dtype = torch.float32
) -> int:
    """Save a class-conditional pipeline whose transformer has about that many 10^6 bytes in float32; the exact number.

    Args:
        folder: where to.
        megabytes: of the transformer.
        blocks, latent: how many it has, and the side of its latents.
        dtype: of the transformer's weights in the file.
    """
    import diffusers

    def transformer(heads: int) -> Any:
        torch.manual_seed(0)
        return diffusers.DiTTransformer2DModel(
            num_attention_heads=heads,
            attention_head_dim=64,
            in_channels=4,
            out_channels=8,
            num_layers=blocks,
            sample_size=latent,
            patch_size=2,
            num_embeds_ada_norm=8,
        )

    with torch.device("meta"):
        sizes = {heads: sum(p.numel() * 4 for p in transformer(heads).parameters()) for heads in range(2, 49, 2)}
    model = transformer(min(sizes, key=lambda heads: abs(sizes[heads] - megabytes * 1e6)))
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4, layers_per_block=1)
    size = sum(p.nbytes for p in model.parameters())
    diffusers.DiTPipeline(model.to(dtype), vae, diffusers.DDIMScheduler()).save_pretrained(folder)
    index = folder / "model_index.json"
    names = {number: f"class {number}" for number in range(8)}
    index.write_text(json.dumps({**json.loads(index.read_text()), "id2label": names}))
    return size


class Reads:
    """Counts the bytes of every tensor that is taken out of safetensors files, in place of `safetensors.safe_open`."""

    def __init__(self, opens: Any) -> None:
        self.opens, self.bytes = opens, {}

    def __call__(self, path: Any, *arguments: Any, **more: Any) -> Any:
        opened = self.opens(path, *arguments, **more)
        return _File(opened, self) if Path(path).parent.name == "transformer" else opened

    def add(self, name: str, value: torch.Tensor) -> torch.Tensor:
        self.bytes[name] = self.bytes.get(name, 0) + value.nbytes
        return value


class _File:
    def __init__(self, opened: Any, reads: Reads) -> None:
        self._opened, self._reads = opened, reads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def __enter__(self) -> _File:
        self._opened.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened.__exit__(*exception)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._reads.add(name, self._opened.get_tensor(name))

    def get_slice(self, name: str) -> Any:
        return _Slice(name, self._opened.get_slice(name), self._reads)


class _Slice:
    def __init__(self, name: str, stored: Any, reads: Reads) -> None:
        self._name, self._stored, self._reads = name, stored, reads
        self.get_shape, self.get_dtype = stored.get_shape, stored.get_dtype

    def __getitem__(self, places: Any) -> torch.Tensor:
        return self._reads.add(self._name, self._stored[places])


def private() -> int:
    """Bytes of this process's private memory (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise OSError("the kernel does not say how much private memory a process has")


def watched(job: Any, whole: bool) -> dict[str, Any]:
    """On a rank: what it holds at most, and reads, while the job is done."""
    import diffusers
    import safetensors

    from ditmesh.generate import loading, run

    # Lazy imports are not what is measured.
    diffusers.DiffusionPipeline.from_pretrained(job.model, transformer=None)
    reads, found, ended = Reads(safetensors.safe_open), {"peak": 0}, threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            found["peak"] = max(found["peak"], private())

    before = private()
    thread = threading.Thread(target=watch)
    thread.start()
    started = time.perf_counter()
    patches = [mock.patch.object(safetensors, "safe_open", reads)]
    if whole:
        patches.append(mock.patch.object(loading, "partial_read_refusal", return_value="to compare with"))
        # Ranks of a host would have one copy of it.
        patches.append(mock.patch.object(loading, "shareable_components", return_value=[]))
    try:
        for patch in patches:
            patch.start()
        run.generate(job)
    finally:
        mock.patch.stopall()
        ended.set()
        thread.join()
    return {
        "peak": max(found["peak"], private()) - before,
        "read": reads.bytes,
        "seconds": time.perf_counter() - started,
    }


def measure(folder: Path, config: ParallelConfig, whole: bool) -> list[dict[str, Any]]:
    """Every rank's figures."""
    from ditmesh.generate.job import check_job, job_for
    from ditmesh.generate.model_info import find_model
    from ditmesh.launch import RankPool
    from ditmesh.request import PictureRequest

    info = find_model(folder)
    job = job_for(info, PictureRequest(prompt="class 1", steps=1, guidance=1.0), folder / "out", config=config)
    check_job(job, info, config.world_size)
    with RankPool(config.world_size, threads=1) as pool:
        # The weights' files are float32: in bfloat16 a rank cannot use the mapped file as its memory.
        return pool.run(watched, job.changed(dtype="bfloat16"), whole)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--megabytes", type=float, default=1000, help="of the transformer as it runs, in bfloat16")
    parser.add_argument("--config", default="tensor=2", help="words such as 'tensor=2' or 'pipe=2 tensor=2'")
    parser.add_argument("--whole", action="store_true", help="also load it whole on every rank")
    options = parser.parse_args()
    from ditmesh.cli.values import parse_config

    config = parse_config(options.config)
    with tempfile.TemporaryDirectory() as folder:
        stored = make(Path(folder), options.megabytes * 2)
        figures: dict[str, Any] = {"machine": describe_machine(), "config": config.describe(), "bytes": stored // 2}
        for how in ("share", "whole") if options.whole else ("share",):
            ranks = measure(Path(folder), config, how == "whole")
            figures[how] = [
                {
                    "peak": rank["peak"] / (stored / 2),
                    "read": sum(rank["read"].values()) / stored,
                    "seconds": rank["seconds"],
                }
                for rank in ranks
            ]
            for number, one in enumerate(figures[how]):
                # Whole files diffusers reads by other ways.
                read = f", {one['read']:.1%} of the file read" if how == "share" else ""
                print(
                    f"{how}, rank {number} of {config.describe()}: {one['peak']:.1%} of {stored / 2e6:.0f} MB in "
                    f"private memory at most{read}, {one['seconds']:.1f} s"
                )
        write_figures(figures, options.json)


if __name__ == "__main__":
    main()
