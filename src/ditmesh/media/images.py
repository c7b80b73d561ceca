"""Reading of images: 8-bit sRGB, upright, over white; masks as levels of grey.

What a file has besides its samples decides what is seen, and each is followed here:

* **Upright**: the orientation in EXIF or XMP is applied, also to the size that is read from the file's head alone.
* **Range**: integers of 16 bits are scaled from 0..65535, of 12 bits from 0..4095. Samples of 32 bits have no range
  that could be known and are refused, and so is CIELAB.
* **Transparency**: alpha, palettes with alpha and colour keys are laid over white.
* **Colour**: an embedded ICC profile is converted to sRGB (ICC.1:2022; by LittleCMS). One that is broken or is of
  another kind of image is ignored with a warning, as viewers do.
* **Animation**: the first frame.
* **Limits**: pixels and bytes are bounded before anything is decoded.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from io import BytesIO
from typing import TYPE_CHECKING, Any, BinaryIO

from ..errors import InputError, shortened

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

# Names that images have. Animated ones are videos as well.
IMAGE_SUFFIXES = (
    ".png", ".apng", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif", ".jp2", ".ppm", ".pgm"
)  # fmt: skip
# Pillow's formats that are read. Some other formats start programs (EPS), or are not single images.
READ_FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "BMP", "GIF", "TIFF", "AVIF", "JPEG2000", "PPM")
# Pixels of an image, at most.
MOST_PIXELS = 2**27

# Tags of TIFF 6.0, and a value of the second.
_BITS_PER_SAMPLE, _PHOTOMETRIC, _WHITE_IS_ZERO = 258, 262, 0
# Of EXIF 2.32.
_ORIENTATION = 0x0112

# First bytes of Pillow's formats, to distinguish them from videos.
_BEGINNINGS = (b"\x89PNG", b"GIF8", b"\xff\xd8", b"BM", b"II*\0", b"MM\0*", b"P5\n", b"P6\n")


def is_image(head: bytes) -> bool:
    """True if Pillow reads a file, by its first 12 bytes; otherwise it may be a video."""
    return head.startswith(_BEGINNINGS) or head[8:12] == b"WEBP" or head[4:12] in (b"ftypavif", b"ftypavis")


def read_image(
    file: BinaryIO, name: str, *, most_pixels: int = MOST_PIXELS, formats: tuple[str, ...] = READ_FORMATS
) -> Image:
    """The image in a seekable file, upright sRGB; of an animation the first frame.

    `InputError`: it is none, is corrupt, has more pixels, or samples of a range that cannot be known.

    Args:
        name: of the file, for messages.
        formats: of Pillow, which it may be of.
    """
    with opened_image(file, name, most_pixels, formats) as image:
        image.load()
        return as_seen(image, name)


def read_mask(
    file: BinaryIO, name: str, *, most_pixels: int = MOST_PIXELS, formats: tuple[str, ...] = READ_FORMATS
) -> Image:
    """The mask in a file, L: white is what is generated. Arguments and errors as of `read_image`.

    Colours count by their luminance; profiles do not apply to a mask. Of a mask with transparent pixels those that are
    transparent throughout are white and all others black, whatever their colours: the form of OpenAI's API.
    """
    with opened_image(file, name, most_pixels, formats) as image:
        image.load()
        return as_mask(image, name)


def image_size(file: BinaryIO, name: str) -> tuple[int, int]:
    """(height, width) of an image as `read_image` returns it; only the file's head is read, as far as Pillow can."""
    with opened_image(file, name) as image:
        width, height = image.size
        # Pillow swaps the sides of a TIFF by itself.
        if image.format != "TIFF" and _orientation(image, name) >= 5:
            width, height = height, width
        return height, width


def as_seen(image: Image, name: str) -> Image:
    """An opened image of any mode as RGB: upright, in sRGB, over white. Errors as of `read_image`."""
    import PIL.Image

    turned = _upright(image, name)
    colour, alpha = _parts(_eight_bits(turned, name))
    colour = _in_srgb(colour, image.info.get("icc_profile"), name)
    if alpha is None:
        return colour
    seen = PIL.Image.merge("RGBA", (*colour.split(), alpha))
    return PIL.Image.alpha_composite(PIL.Image.new("RGBA", seen.size, "white"), seen).convert("RGB")


def as_mask(image: Image, name: str) -> Image:
    """An opened image of any mode as a mask, as `read_mask` reads it. Errors as of `read_image`."""
    colour, alpha = _parts(_eight_bits(_upright(image, name), name))
    least = 255 if alpha is None else alpha.getextrema()[0]
    if alpha is None or least == 255:
        return colour.convert("L")
    if least:
        raise InputError(
            f"{name} has pixels that are partly transparent and none that is transparent throughout; save the mask "
            "without transparency, white where the image is to be generated"
        )
    return alpha.point([255] + [0] * 255)


# --- opening ----------------------------------------------------------------------------------------------------


@contextmanager
def opened_image(
    file: BinaryIO, name: str, most_pixels: int = MOST_PIXELS, formats: tuple[str, ...] = READ_FORMATS
) -> Iterator[Any]:
    """Pillow's image of which the head is read; what Pillow raises in the block becomes an `InputError`."""
    from PIL import Image, UnidentifiedImageError

    Image.init()
    try:
        # Pillow warns about large images, corrupt EXIF and palettes, which this module handles.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(file, formats=[kind for kind in formats if kind in Image.OPEN]) as image:
                if image.width * image.height > most_pixels:
                    raise Image.DecompressionBombError
                yield image
    except Image.DecompressionBombError:
        raise InputError(f"{name} has more than {most_pixels} pixels; give a smaller image") from None
    except UnidentifiedImageError:
        kinds = ", ".join(kind for kind in formats if kind != "MPO")
        raise InputError(f"{name} is not an image that can be read; its format is to be one of {kinds}") from None
    except InputError:
        raise
    except Exception as error:
        # Pillow can raise any exception for an untrusted file.
        reason = shortened(error)
        raise InputError(f"{name} is corrupt and cannot be decoded ({reason}); save the image again") from None


@lru_cache(maxsize=1024)
def _warn_once(message: str) -> None:
    """The same file is read in every epoch."""
    logger.warning("%s", message)


def _orientation(image: Image, name: str) -> int:
    """EXIF's orientation, 1 to 8, from what is read of the file so far."""
    import PIL.Image

    try:
        # A PNG's own method would decode all of it, to find EXIF behind the pixels.
        orientation = PIL.Image.Image.getexif(image).get(_ORIENTATION, 1)
    except Exception as error:
        _warn_once(f"{name}: its EXIF data cannot be read ({error}), so it is taken for upright")
        return 1
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1


def _upright(image: Image, name: str) -> Image:
    from PIL import ImageOps

    if _orientation(image, name) == 1:
        return image
    turned = ImageOps.exif_transpose(image)
    turned.format = image.format
    return turned


# --- samples ----------------------------------------------------------------------------------------------------


def _eight_bits(image: Image, name: str) -> Image:
    """The same image with samples of 8 bits; transparency stays, as alpha or a key of 8 bits."""
    import numpy as np
    import PIL.Image

    # Of some formats Pillow holds 16 bits in 32.
    if image.mode in ("F", "LAB") or (image.mode == "I" and image.format not in ("PNG", "PPM", "JPEG2000")):
        what = "colours in CIELAB" if image.mode == "LAB" else "samples of 32 bits, of a range that cannot be known"
        raise InputError(f"{name} has {what}; save the image as RGB with 8 or 16 bits")
    key = image.info.get("transparency")
    if image.mode == "RGB" and isinstance(key, tuple) and max(key) > 255:
        # The key of a PNG of 16 bits; Pillow has cut its samples to their upper 8.
        image = image.copy()
        image.info["transparency"] = tuple(value >> 8 for value in key)
    if not image.mode.startswith("I"):
        return image
    values = np.asarray(image)
    tags: Any = getattr(image, "tag_v2", {})
    top = 4095 if 12 in tags.get(_BITS_PER_SAMPLE, ()) else 65535
    levels = (values.astype(np.int64) * 255 + top // 2) // top
    # Pillow inverts samples of 8 bits by itself.
    levels = 255 - levels if image.mode != "I" and tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO else levels
    grey = PIL.Image.fromarray(levels.clip(0, 255).astype(np.uint8))
    if isinstance(key, int):
        grey.putalpha(PIL.Image.fromarray(np.where(values == key, 0, 255).astype(np.uint8)))
    return grey


def _parts(image: Image) -> tuple[Image, Image | None]:
    """Colours (L, RGB or CMYK) and alpha (L) of an image of 8 bits; None: it is opaque."""
    if image.has_transparency_data:
        whole = image.convert("LA" if image.mode in ("1", "L", "LA", "La") else "RGBA")
        return whole.convert(whole.mode[:-1]), whole.getchannel("A")
    if image.mode in ("L", "RGB", "CMYK"):
        return image, None
    return image.convert("L" if image.mode == "1" else "RGB"), None


# --- colours ----------------------------------------------------------------------------------------------------

# Spaces of ICC profiles, and the mode of an image that is in one.
_SPACES = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}


def _in_srgb(colour: Image, profile: bytes | None, name: str) -> Image:
    if profile:
        try:
            mode, transform = _transform(profile)
            # Grey levels under a profile of RGB are equal parts of it.
            given = colour.convert("RGB") if (colour.mode, mode) == ("L", "RGB") else colour
            if given.mode != mode:
                raise ValueError(f"it is of {mode}, and the image of {colour.mode}")
            return given.convert("RGB") if transform is None else transform.apply(given)
        except Exception as error:
            _warn_once(f"{name}: its colour profile cannot be used ({error}), so it is taken for sRGB")
    return colour.convert("RGB")


@lru_cache(maxsize=32)
def _transform(profile: bytes) -> tuple[str, Any]:
    """The mode of images with this profile, and their transform to sRGB; None: the profile is equivalent to sRGB."""
    import numpy as np
    from PIL import Image, ImageCms

    try:
        opened = ImageCms.ImageCmsProfile(BytesIO(profile))
        parsed: Any = opened.profile
        space = str(parsed.xcolor_space).strip()
        mode = _SPACES.get(space)
        if mode is None:
            raise ValueError(f"its space is {space}")
        transform = ImageCms.buildTransform(opened, ImageCms.createProfile("sRGB"), mode, "RGB")
    except (ImageCms.PyCMSError, OSError, TypeError) as error:
        raise ValueError(shortened(error)) from None
    if mode in ("RGB", "L"):
        # Most profiles are sRGB under one name or another: their images keep their values to the last bit.
        steps = np.arange(0, 256, 15, dtype=np.uint8)
        cube = np.stack(np.meshgrid(steps, steps, steps), axis=-1).reshape(-1, len(steps), 3)
        probe = Image.fromarray(cube if mode == "RGB" else cube[..., 0].copy())
        before = np.asarray(probe.convert("RGB")).astype(int)
        if np.abs(np.asarray(transform.apply(probe)).astype(int) - before).max() <= 2:
            return mode, None
    return mode, transform
