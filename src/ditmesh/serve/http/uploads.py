"""Clients' input images: decoded within a limit and encoded again, so that only their pixels are stored."""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from io import BytesIO

from ...errors import InputError
from ...media.images import read_image, read_mask
from .errors import Refused

# A data URL; nothing that a client sends is ever fetched or opened as a path.
DATA_URL = re.compile(r"data:image/(?:png|jpeg|webp);base64,(?P<data>[A-Za-z0-9+/=]*)", re.ASCII)
# Photographs of phones may be MPO, which is JPEG with additional data.
UPLOAD_FORMATS = ("PNG", "JPEG", "MPO", "WEBP")
# Images that are decoded at the same time.
TOGETHER = 2


def data_url(data: bytes) -> str:
    """A file in a data URL; its bytes show the format."""
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def from_data_url(text: str, param: str) -> bytes:
    """The bytes in a data URL. Raises `Refused`: it is another kind of URL, or not base64."""
    match = DATA_URL.fullmatch(text)
    if match is None:
        raise Refused(
            400, f"{param} is no data URL of a PNG, JPEG or WebP; write it as data:image/png;base64,…", param=param
        )
    try:
        return base64.b64decode(match["data"], validate=True)
    except binascii.Error:
        raise Refused(400, f"{param} is not base64; encode the whole file at once", param=param) from None


class Uploads:
    """Decodes images, a few at a time.

    Args:
        most_pixels: of an image.
    """

    def __init__(self, most_pixels: int) -> None:
        self._most_pixels = most_pixels
        self._turn = asyncio.Semaphore(TOGETHER)

    async def png(self, data: bytes, param: str, mask: bool = False) -> tuple[bytes, tuple[int, int]]:
        """An upright sRGB image as a PNG without metadata, RGB (a mask: grey), and (width, height).

        Args:
            data: a PNG, JPEG or WebP.
            param: the field that it came in.
            mask: white is what is generated again; of a mask with transparency it is what is transparent throughout.

        Raises:
            Refused: it is none of these, or too large.
        """

        def converted() -> tuple[bytes, tuple[int, int]]:
            read = read_mask if mask else read_image
            image = read(BytesIO(data), param, most_pixels=self._most_pixels, formats=UPLOAD_FORMATS)
            out = BytesIO()
            image.save(out, format="PNG", compress_level=1)
            return out.getvalue(), image.size

        try:
            async with self._turn:
                return await asyncio.to_thread(converted)
        except InputError as error:
            raise Refused(400, str(error), "invalid_image", param) from None
