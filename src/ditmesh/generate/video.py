"""Videos as files: MP4 with metadata, frames read from whatever PyAV or PIL reads, and strips of frames.

The frames of an MP4 are compressed. What they were compressed of is named by `frames_digest`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from fractions import Fraction
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

# Files that PyAV reads; animated pictures are PIL's.
SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi")
# Frames per second when nobody says how many.
FPS = 16
# x264's constant rate factor: hardly to be told from the frames. Chroma is halved where both sides are even.
QUALITY = "16"
# Of MP4: texts of any name stand in the container under that name, and before the frames.
_OPTIONS = {"movflags": "use_metadata_tags+faststart"}
# Frames of a strip, and its height in pixels, at most.
IN_STRIP, STRIP_HEIGHT = 8, 128


def check_video_library() -> None:
    """Refuse MP4 where PyAV is not installed.

    Raises:
        InputError: it is not.
    """
    if find_spec("av") is None:
        raise InputError("videos are written and read by PyAV, which is not installed; pip install av")


def write_mp4(frames: Sequence[Image], path: str | Path, fps: float, metadata: dict[str, str]) -> None:
    """Write a video, H.264 in MP4; the same bytes for the same frames, metadata and release of PyAV.

    Args:
        frames: of one size.
        path: the file, which is replaced.
        fps: frames per second.
        metadata: texts by name, kept in the container.

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
        stream: Any = container.add_stream("libx264", rate=rate, options={"crf": QUALITY, "preset": "medium"})
        stream.width, stream.height = width, height
        stream.pix_fmt = "yuv444p" if width % 2 or height % 2 else "yuv420p"
        # The bits do not depend on how many there are, but on their being one or several.
        stream.codec_context.thread_count = 1
        for number, image in enumerate(frames):
            frame = av.VideoFrame.from_image(image.convert("RGB"))
            frame.pts, frame.time_base = number, 1 / rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def copy_mp4(content: bytes, path: str | Path, name: str, metadata: dict[str, str]) -> None:
    """Write a video anew with other metadata; its frames stay as they are compressed.

    Args:
        content: of the file.
        path: the file to write.
        name: of the video, for messages.
        metadata: as for `write_mp4`.

    Raises:
        InputError: PyAV is not installed, or the content is not a video.
        OSError: the file cannot be written.
    """
    check_video_library()
    import av

    with _opened(BytesIO(content), name) as read, av.open(str(path), "w", format="mp4", options=_OPTIONS) as container:
        container.metadata.update(metadata)
        stream = container.add_stream_from_template(read.streams.video[0])
        for packet in read.demux(video=0):
            # The last one is empty, and says that there are no more.
            if packet.dts is not None:
                packet.stream = stream
                container.mux(packet)


def metadata_of(path: str | Path) -> dict[str, str]:
    """The texts in a video's container.

    Raises:
        InputError: PyAV is not installed, or the file is not a video that can be read.
    """
    with _opened(path, str(path)) as container:
        return dict(container.metadata)


def is_video(path: str | Path) -> bool:
    """Whether a file begins as MP4 does; one that cannot be read does not."""
    try:
        with Path(path).open("rb") as file:
            return file.read(8)[4:] == b"ftyp"
    except (OSError, ValueError):
        return False


def read_frames(source: str | Path | bytes, name: str, most: int | None = None) -> list[Image]:
    """The frames of a video file or animated picture, RGB.

    Args:
        source: the file, or its content.
        name: of it, for messages.
        most: frames that are read at most.

    Raises:
        InputError: it cannot be read, or PyAV is needed and not installed.
    """
    content = source if isinstance(source, bytes) else Path(source).read_bytes()
    frames: list[Image] = []
    for frame in _pictures(content) if is_picture(content) else _decoded(content, name):
        frames.append(frame)
        if len(frames) == most:
            break
    if not frames:
        raise InputError(f"{name} holds no frame; give a video")
    return frames


def is_picture(content: bytes) -> bool:
    """Whether PIL reads it, by its first bytes: PNG, GIF, WebP or JPEG."""
    return content.startswith((b"\x89PNG", b"GIF8", b"\xff\xd8")) or content[8:12] == b"WEBP"


def _pictures(content: bytes) -> Iterator[Image]:
    from PIL import Image, ImageSequence

    with Image.open(BytesIO(content)) as opened:
        for frame in ImageSequence.Iterator(opened):
            whole = Image.new("RGBA", frame.size, "white")
            yield Image.alpha_composite(whole, frame.convert("RGBA")).convert("RGB")


def _decoded(content: bytes, name: str) -> Iterator[Image]:
    with _opened(BytesIO(content), name) as container:
        from av.error import FFmpegError

        try:
            for frame in container.decode(video=0):
                yield frame.to_image()
        except (FFmpegError, IndexError) as error:
            raise InputError(f"{name} cannot be read as a video ({error}); give another file") from None


def _opened(source: Any, name: str) -> Any:
    check_video_library()
    import av
    from av.error import FFmpegError

    try:
        return av.open(source if isinstance(source, BytesIO) else str(source), "r")
    except (FFmpegError, OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{name} cannot be read as a video ({reason}); give an MP4, GIF or WebP") from None


def frames_digest(frames: Sequence[Image]) -> str:
    """SHA-256 of frames as they are before they are compressed: their number and size, and their RGB bytes in order."""
    width, height = frames[0].size
    state = hashlib.sha256(f"{len(frames)} {width} {height}\n".encode())
    for frame in frames:
        state.update(frame.convert("RGB").tobytes())
    return state.hexdigest()


def strip(frames: Sequence[Image], count: int = IN_STRIP, height: int = STRIP_HEIGHT) -> Image:
    """Some frames of a video side by side, evenly spaced, the first and the last among them."""
    from PIL import Image

    count = min(count, len(frames))
    shown = [frames[round(place * (len(frames) - 1) / max(1, count - 1))].convert("RGB") for place in range(count)]
    if shown[0].height > height:
        width = max(1, round(shown[0].width * height / shown[0].height))
        shown = [frame.resize((width, height), Image.Resampling.LANCZOS) for frame in shown]
    page = Image.new("RGB", (sum(frame.width for frame in shown), shown[0].height))
    for number, frame in enumerate(shown):
        page.paste(frame, (number * shown[0].width, 0))
    return page
