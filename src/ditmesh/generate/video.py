"""Videos as files: MP4 with metadata. Frames are read by `ditmesh.media.videos`.

The frames of an MP4 are compressed. `frames_digest` identifies the frames before compression.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..media.videos import check_video_library, open_container
from ..media.videos import read_frames as read_frames

if TYPE_CHECKING:
    from PIL.Image import Image

# Frames per second where the request does not say how many.
FPS = 16
# x264's constant rate factor, with hardly visible loss. Chroma is halved where both sides are even.
QUALITY = "16"
# x264's macroblock tree reads memory that it never wrote (seen with release 165 under MALLOC_PERTURB_): the same frames
# would be compressed to other bytes from one call to the next. Files are about a tenth larger without it.
_ENCODER = {"crf": QUALITY, "preset": "medium", "x264-params": "mbtree=0"}
# Of MP4: texts of any name stand in the container under that name, and before the frames.
_OPTIONS = {"movflags": "use_metadata_tags+faststart"}


def write_mp4(frames: Sequence[Image], path: str | Path, fps: float, metadata: dict[str, str]) -> None:
    """Write a video, H.264 in MP4; the same bytes for the same frames, metadata and release of PyAV.

    Raises:
        InputError: PyAV is not installed.
        OSError: the file cannot be written.
    """
    check_video_library()
    import av

    rate = Fraction(fps).limit_denominator(1001)
    width, height = frames[0].size
    with av.open(str(path), "w", format="mp4", options=_OPTIONS) as container:
        container.metadata.update(metadata)
        stream: Any = container.add_stream("libx264", rate=rate, options=_ENCODER)
        stream.width, stream.height = width, height
        stream.pix_fmt = "yuv444p" if width % 2 or height % 2 else "yuv420p"
        # The bits do not depend on how many there are, but on their being one or several.
        stream.codec_context.thread_count = 1
        for number, image in enumerate(frames):
            frame = av.VideoFrame.from_image(image.convert("RGB"))
            frame.pts, frame.time_base = number, 1 / rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def metadata_of(path: str | Path) -> dict[str, str]:
    """The texts in a video's container; an `InputError` if it is none, or PyAV is not installed."""
    with open_container(path, str(path)) as container:
        return dict(container.metadata)


def is_video(path: str | Path) -> bool:
    """True if a file begins as MP4 does; one that cannot be read does not."""
    try:
        with Path(path).open("rb") as file:
            return file.read(8)[4:] == b"ftyp"
    except (OSError, ValueError):
        return False


def frames_digest(frames: Sequence[Image]) -> str:
    """SHA-256 of frames before compression: their number and size, and their RGB bytes in order."""
    width, height = frames[0].size
    state = hashlib.sha256(f"{len(frames)} {width} {height}\n".encode())
    for frame in frames:
        state.update(frame.convert("RGB").tobytes())
    return state.hexdigest()
