"""Input pictures that clients send: decoded under a bound, and encoded anew, so that nothing else is kept of them."""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
import warnings
from io import BytesIO

from .errors import Refused

# A data URL; nothing that a client sends is ever fetched or opened as a path.
DATA_URL = re.compile(r"data:image/(?:png|jpeg|webp);base64,(?P<data>[A-Za-z0-9+/=]*)", re.ASCII)
FORMATS = ("PNG", "JPEG", "WEBP")
# Pictures that are decoded at the same time.
TOGETHER = 2


def from_data_url(text: str, param: str) -> bytes:
    """The bytes in a data URL.

    Raises:
        Refused: it is another kind of URL, or not base64.
    """
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
    """Decodes pictures, a few at a time.

    Args:
        most_pixels: of a picture.
    """

    def __init__(self, most_pixels: int) -> None:
        self._most_pixels = most_pixels
        self._turn = asyncio.Semaphore(TOGETHER)

    async def png(self, data: bytes, param: str, mask: bool = False) -> tuple[bytes, tuple[int, int]]:
        """A picture as a PNG without anything else in it, RGB (a mask: grey), and its width and height in pixels.

        Args:
            data: a PNG, JPEG or WebP.
            param: the field that it came in.
            mask: white is what is generated anew; of a mask with transparency it is what is transparent throughout.

        Raises:
            Refused: it is none of these, or too large.
        """
        async with self._turn:
            return await asyncio.to_thread(self._png, data, param, mask)

    def _png(self, data: bytes, param: str, mask: bool) -> tuple[bytes, tuple[int, int]]:
        from PIL import Image, ImageOps, UnidentifiedImageError

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                image = Image.open(BytesIO(data), formats=FORMATS)
                # Before anything is decoded.
                if image.width * image.height > self._most_pixels:
                    raise Image.DecompressionBombError
                # As a camera was turned.
                image = ImageOps.exif_transpose(image)
                if mask and image.has_transparency_data:
                    alpha = image.convert("RGBA").getchannel("A")
                    image = alpha.point([255] + [0] * 255)
                image = image.convert("L" if mask else "RGB")
                out = BytesIO()
                image.save(out, format="PNG", compress_level=1)
        except Image.DecompressionBombError:
            message = f"{param} has more than {self._most_pixels} pixels; send a smaller picture"
        except UnidentifiedImageError:
            message = f"{param} is not a picture; send a PNG, JPEG or WebP"
        except Exception as error:
            # What PIL says of broken files can be anything.
            message = f"{param} cannot be decoded ({str(error)[:200] or type(error).__name__}); save the picture again"
        else:
            return out.getvalue(), image.size
        raise Refused(400, message, "invalid_image", param)
