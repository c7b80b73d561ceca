"""Videos as MP4 files, written by PyAV."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

# H.264, which every browser plays; quality as of x264's crf, at which no difference is seen.
CODEC, QUALITY = "libx264", "17"


def check_writer() -> None:
    """Refuse MP4 files where there is nothing to write them with: `InputError`."""
    if find_spec("av") is None:
        raise InputError(
            "format mp4: PyAV, which writes it, is not installed on the server; pip install av there, or ask for "
            "format png or webp"
        )


def mp4(frames: Sequence[Image], fps: int) -> bytes:
    """Frames of one size as a video of H.264. The same frames give the same bytes.

    Raises:
        InputError: there is nothing to write it with.
    """
    check_writer()
    import av

    width, height = frames[0].size
    # The index goes first, so that players begin before they have all of it: the file is gone through again for that.
    with tempfile.TemporaryDirectory(prefix="ditmesh-") as folder:
        path = Path(folder) / "film.mp4"
        with av.open(path, "w", options={"movflags": "faststart"}) as file:
            # Threads share frames out, and the bytes with them.
            stream: Any = file.add_stream(CODEC, rate=fps, options={"crf": QUALITY, "threads": "1"})
            stream.width, stream.height = width, height
            # Colour of half the resolution is what all play; it takes even sides.
            stream.pix_fmt = "yuv420p" if width % 2 == height % 2 == 0 else "yuv444p"
            for frame in frames:
                file.mux(stream.encode(av.VideoFrame.from_image(frame.convert("RGB"))))
            file.mux(stream.encode())
        return path.read_bytes()
