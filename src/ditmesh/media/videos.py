"""Reading of videos and animated images: frames in sRGB, upright, with square pixels, over white."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ..errors import InputError, reason_of
from ..requirements import not_installed
from .files import open_file
from .images import MOST_PIXELS, as_seen, image_size, is_image, opened_image

if TYPE_CHECKING:
    from PIL.Image import Image

# Names of files that PyAV reads; animated images are Pillow's.
VIDEO_SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v")
# Pixels of all frames of a video.
MOST_VIDEO_PIXELS = 2**30

# Containers of FFmpeg that are read, and nothing that would open other files or addresses (playlists, lists of files).
_CONTAINERS = {
    "format_whitelist": "mov,mp4,matroska,webm,avi,mpegts,mpeg,flv,asf,ogg,m4v",
    "protocol_whitelist": "none",
}
# Transfer functions that players map to what a screen can show (ITU-T H.273, table 3).
_HDR = {16: "PQ", 18: "HLG"}


def check_video_library() -> None:
    """Raise an `InputError` if PyAV is not installed."""
    if find_spec("av") is None:
        raise InputError(not_installed("reading or writing a video", "PyAV", "video"))


def read_frames(
    source: str | Path | bytes | BinaryIO, name: str, most: int | None = None, most_pixels: int = MOST_VIDEO_PIXELS
) -> list[Image]:
    """The frames of a video file or animated image, RGB.

    `InputError`: it cannot be read, is corrupt or too large, or PyAV is needed and not installed.

    Args:
        source: the file, its content, or the opened file.
        most: frames that are read at most.
        most_pixels: of all these frames.
    """
    frames: list[Image] = []
    pixels = 0
    with _file(source, name) as file:
        for frame in _frames(file, name):
            pixels += frame.width * frame.height
            if pixels > most_pixels:
                raise InputError(f"{name} has more than {most_pixels} pixels in its frames; give fewer or smaller ones")
            frames.append(frame)
            if len(frames) == most:
                break
    if not frames:
        raise InputError(f"{name} holds no frame; give a video")
    return frames


def frame_size(file: BinaryIO, name: str) -> tuple[int, int]:
    """(height, width) of the frames of a video or animated image; of a video the first frame is decoded."""
    if is_image(_head(file)):
        return image_size(file, name)
    # Containers may give wrong sizes.
    for frame in _frames(file, name):
        return frame.height, frame.width
    raise InputError(f"{name} holds no frame; give a video")


def open_container(source: Any, name: str) -> Any:
    """A video opened by PyAV, from a file's name or an opened file; an `InputError` if that fails."""
    check_video_library()
    import av
    from av.error import FFmpegError

    try:
        if isinstance(source, (str, Path)):
            source = open_file(source, name, most=2**63)
        return av.open(source, "r", options=dict(_CONTAINERS))
    except (FFmpegError, OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{name} cannot be read as a video ({reason_of(error)}); give an MP4, GIF or WebP") from None


# --- frames -----------------------------------------------------------------------------------------------------


def _file(source: str | Path | bytes | BinaryIO, name: str) -> BinaryIO:
    if isinstance(source, bytes):
        return BytesIO(source)
    return open_file(source, name) if isinstance(source, (str, Path)) else source


def _head(file: BinaryIO) -> bytes:
    file.seek(0)
    head = file.read(12)
    file.seek(0)
    return head


def _frames(file: BinaryIO, name: str) -> Iterator[Image]:
    return _animated(file, name) if is_image(_head(file)) else _decoded(file, name)


def _animated(file: BinaryIO, name: str) -> Iterator[Image]:
    with opened_image(file, name) as opened:
        count = getattr(opened, "n_frames", 1)
        # An animated PNG may begin with an image for programs that show no animation.
        first = 1 if opened.info.get("default_image") and count > 1 else 0
        for number in range(first, count):
            opened.seek(number)
            opened.load()
            yield as_seen(opened, name)


def _decoded(file: BinaryIO, name: str) -> Iterator[Image]:
    with open_container(file, name) as container:
        try:
            if not container.streams.video:
                raise InputError(f"{name} holds no video stream; give a video")
            stream = container.streams.video[0]
            for number, frame in enumerate(container.decode(stream)):
                if frame.width * frame.height > MOST_PIXELS:
                    raise InputError(f"{name} has frames of more than {MOST_PIXELS} pixels; give a smaller video")
                if frame.is_corrupt:
                    raise InputError(f"{name} is corrupt in frame {number}; save the video again")
                if getattr(frame, "color_trc", 0) in _HDR:
                    curve = _HDR[frame.color_trc]
                    raise InputError(f"{name} is HDR ({curve}), which needs tone mapping; save the video as SDR")
                yield _as_shown(frame, stream, name)
        except InputError:
            raise
        except Exception as error:
            # Decoders and scalers can raise any exception for an untrusted file.
            raise InputError(f"{name} cannot be read as a video ({error}); give another file") from None


def _as_shown(frame: Any, stream: Any, name: str) -> Image:
    """A decoded frame with the video's rotation and square pixels."""
    import PIL.Image

    if any(component.is_alpha for component in frame.format.components):
        image = as_seen(PIL.Image.fromarray(frame.to_ndarray(format="rgba")), name)
    else:
        image = frame.to_image()
    # The shape of a pixel, of videos from discs and tapes.
    shape = stream.sample_aspect_ratio
    if shape and shape > 0 and shape != 1 and 0.1 < shape < 10:
        image = image.resize((max(1, round(image.width * shape)), image.height), PIL.Image.Resampling.BICUBIC)
    return _turned(image, frame, name)


def _turned(image: Image, frame: Any, name: str) -> Image:
    """Apply the container's display matrix: a camera that was turned, or that mirrors."""
    from PIL.Image import Transpose

    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return image
    # Rows of 3 numbers of 16.16 bits, and of 2.30 in the last column (ISO/IEC 14496-12, 6.2.2).
    a, b, _, c, d = struct.unpack("=5i", bytes(matrix)[:20])
    if (a == 0) != (d == 0) or (b == 0) != (c == 0) or (a == 0) == (b == 0):
        raise InputError(f"{name} is turned by other than right angles; save the video upright")
    across, down = (a, d) if a else (c, b)
    image = image if a else image.transpose(Transpose.TRANSPOSE)
    image = image if across > 0 else image.transpose(Transpose.FLIP_LEFT_RIGHT)
    return image if down > 0 else image.transpose(Transpose.FLIP_TOP_BOTTOM)
