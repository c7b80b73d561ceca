"""Images and videos of others: what a person sees, or a sentence that names them."""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms

from ditmesh.errors import InputError
from ditmesh.generate.files import input_picture
from ditmesh.generate.job import check_content, job_for
from ditmesh.generate.model_info import find_model
from ditmesh.media.files import open_file
from ditmesh.media.images import image_size, read_image, read_mask
from ditmesh.media.videos import frame_size, read_frames
from ditmesh.request import PictureRequest

# Shown 48 wide and 96 high: red above blue.
UPRIGHT = np.zeros((96, 48, 3), np.uint8)
UPRIGHT[:48, :, 0] = UPRIGHT[48:, :, 2] = 255
RED, BLUE, WHITE, GREY = (255, 0, 0), (0, 0, 255), (255, 255, 255), (128, 128, 128)
# How an upright image is stored under each orientation of EXIF.
STORED = {
    1: UPRIGHT,
    2: UPRIGHT[:, ::-1],
    3: UPRIGHT[::-1, ::-1],
    4: UPRIGHT[::-1],
    5: UPRIGHT.transpose(1, 0, 2),
    6: np.rot90(UPRIGHT),
    7: UPRIGHT[::-1, ::-1].transpose(1, 0, 2),
    8: np.rot90(UPRIGHT, -1),
}


def file_of(image: Image.Image | np.ndarray, kind: str = "PNG", **more: Any) -> bytes:
    out = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(np.ascontiguousarray(image))).save(out, kind, **more)
    return out.getvalue()


def turned(orientation: int, kind: str) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return file_of(STORED[orientation], kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))


def seen(content: bytes) -> np.ndarray:
    """What is trained on, after the sizes of the file's head and of what is decoded were compared."""
    image = read_image(io.BytesIO(content), "a file")
    assert image.mode == "RGB"
    assert image_size(io.BytesIO(content), "a file") == (image.height, image.width)
    return np.asarray(image)


def close(found: Any, expected: tuple[int, ...], by: int = 3) -> bool:
    return bool(np.abs(np.asarray(found).astype(int) - np.asarray(expected)).max() <= by)


def constant(value: Any, mode: str, dtype: Any = np.uint8) -> Image.Image:
    """Left the value, right a quarter of it."""
    values = np.empty((8, 8, *np.shape(value)), dtype)
    values[:, :4], values[:, 4:] = value, np.asarray(value) / 4
    return Image.fromarray(values, mode) if mode in ("LA", "RGBA", "CMYK") else Image.fromarray(values)


# --- upright -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_upright(orientation, kind):
    found = seen(turned(orientation, kind))
    assert found.shape == (96, 48, 3)
    assert close(found[10, 24], RED)
    assert close(found[85, 24], BLUE)


# --- samples -----------------------------------------------------------------------------------------------------

HALF, DEEP = 32768, constant(32768, "I;16", np.uint16)
ALPHA = constant((0, 128), "LA")
KEYED = constant((128, 128, 128), "RGB")
PALETTE = Image.fromarray(np.zeros((8, 8), np.uint8), "P")
PALETTE.putpalette([200, 0, 0, 128, 128, 128])


def deep_rgb(key: tuple[int, int, int] | None = None) -> bytes:
    """A PNG of 16 bits a channel, which Pillow does not write."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    row = b"\0" + np.full((8, 3), HALF, ">u2").tobytes()
    keyed = b"" if key is None else chunk(b"tRNS", struct.pack(">3H", *key))
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 16, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + keyed + chunk(b"IDAT", zlib.compress(row * 8)) + chunk(b"IEND", b"")


SAMPLES: dict[str, tuple[Callable[[], bytes], tuple[int, int, int]]] = {
    "PNG of 16 bits": (lambda: file_of(DEEP), GREY),
    "TIFF of 16 bits": (lambda: file_of(DEEP, "TIFF"), GREY),
    "TIFF of 16 bits, white is zero": (lambda: file_of(DEEP, "TIFF", tiffinfo={262: 0}), (127, 127, 127)),
    "PGM of 16 bits": (lambda: file_of(DEEP, "PPM"), GREY),
    "PNG of 16 bits with a key": (lambda: file_of(DEEP, transparency=HALF), WHITE),
    "PNG of RGB with 16 bits": (deep_rgb, GREY),
    "PNG of RGB with 16 bits and a key": (lambda: deep_rgb((HALF, HALF, HALF)), WHITE),
    "PNG of 1 bit": (lambda: file_of(Image.new("1", (8, 8), 1)), WHITE),
    "CMYK": (lambda: file_of(constant((0, 0, 0, 127), "CMYK"), "JPEG", quality=95), GREY),
    "grey with alpha": (lambda: file_of(ALPHA), (127, 127, 127)),
    "RGBA": (lambda: file_of(constant((255, 0, 0, 128), "RGBA")), (255, 127, 127)),
    "WebP with alpha": (
        lambda: file_of(constant((255, 0, 0, 128), "RGBA"), "WEBP", lossless=True, exact=True),
        (255, 127, 127),
    ),
    "premultiplied alpha": (
        lambda: file_of(constant((255, 0, 0, 128), "RGBA"), "TIFF", tiffinfo={338: 2}),
        (255, 127, 127),
    ),
    "a colour key": (lambda: file_of(KEYED, transparency=(128, 128, 128)), WHITE),
    "a key of grey": (lambda: file_of(constant(128, "L"), transparency=128), WHITE),
    "a palette": (lambda: file_of(PALETTE), (200, 0, 0)),
    "a palette with a key": (lambda: file_of(PALETTE, transparency=0), WHITE),
    "a palette with alpha": (lambda: file_of(PALETTE, transparency=b"\x80\xff"), (227, 127, 127)),
    "GIF with a key": (lambda: file_of(PALETTE, "GIF", transparency=0), WHITE),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_are_what_a_person_sees(name):
    made, expected = SAMPLES[name]
    found = seen(made())
    assert close(found[4, 1], expected), found[4, 1]
    if name.startswith(("PGM", "PNG of 16 bits")) and "key" not in name:
        assert close(found[4, 6], (32, 32, 32)), found[4, 6]


def test_range_that_cannot_be_known_is_refused():
    for image, words in (
        (constant(HALF, "I", np.int32), "has samples of 32 bits"),
        (constant(0.5, "F", np.float32), "has samples of 32 bits"),
        (Image.new("LAB", (8, 8), (137, 128, 128)), "has colours in CIELAB"),
    ):
        with pytest.raises(InputError, match=words):
            seen(file_of(image, "TIFF"))


# --- colours -----------------------------------------------------------------------------------------------------


def wide_profile() -> bytes:
    """A profile of RGB whose red and blue are exchanged, so that it cannot be overlooked."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    count = struct.unpack(">I", profile[128:132])[0]
    places = {bytes(profile[132 + 12 * i : 136 + 12 * i]): 132 + 12 * i for i in range(count)}
    red, blue = places[b"rXYZ"], places[b"bXYZ"]
    profile[red : red + 4], profile[blue : blue + 4] = b"bXYZ", b"rXYZ"
    return bytes(profile)


def test_profiles_are_converted_to_srgb(caplog):
    plain = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    assert (seen(file_of(UPRIGHT, icc_profile=plain)) == UPRIGHT).all()
    found = seen(file_of(UPRIGHT, icc_profile=wide_profile()))
    assert close(found[10, 24], BLUE, 8)
    # Under transparency as well, and of a palette's colours.
    with_alpha = np.dstack([UPRIGHT, np.full((96, 48), 128, np.uint8)])
    assert close(seen(file_of(with_alpha, icc_profile=wide_profile()))[10, 24], (127, 127, 255), 8)
    whole = Image.fromarray(UPRIGHT).convert("P")
    assert close(seen(file_of(whole, icc_profile=wide_profile()))[10, 24], BLUE, 8)
    assert not caplog.records
    for broken in (b"nonsense", plain[:200]):
        assert (seen(file_of(UPRIGHT, "TIFF", icc_profile=broken)) == UPRIGHT).all()
    assert "its colour profile cannot be used" in caplog.text
    # A profile of RGB on grey levels.
    assert close(seen(file_of(constant(128, "L"), icc_profile=plain))[4, 1], GREY)


# --- masks -------------------------------------------------------------------------------------------------------


def test_masks():
    def mask(content: bytes) -> list[int]:
        found = read_mask(io.BytesIO(content), "--mask")
        assert found.mode == "L"
        return np.asarray(found)[4, [1, 6]].tolist()

    assert mask(file_of(DEEP)) == [128, 32]
    half = np.zeros((8, 8, 4), np.uint8)
    half[:, :4] = (0, 0, 0, 255)
    # Transparent throughout is what is generated, whatever the colours; an opaque mask goes by its colours.
    assert mask(file_of(half)) == [0, 255]
    half[:, 4:] = (255, 255, 255, 255)
    assert mask(file_of(half)) == [0, 255]
    half[..., 3] = 128
    with pytest.raises(InputError, match="partly transparent"):
        mask(file_of(half))
    assert np.asarray(read_mask(io.BytesIO(turned(6, "PNG")), "m")).shape == (96, 48)


# --- animation ---------------------------------------------------------------------------------------------------


def test_animated_images():
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "green")]
    for kind, more in (("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {})):
        content = file_of(frames[0], kind, save_all=True, append_images=frames[1:], duration=100, **more)
        assert close(seen(content)[4, 4], RED)
        assert [one.getpixel((4, 4)) for one in read_frames(content, kind)][:2] == [RED, BLUE]
        assert frame_size(io.BytesIO(content), kind) == (8, 8)
    # An image for programs that show no animation is no frame of it.
    content = file_of(frames[0], save_all=True, default_image=True, append_images=frames[1:])
    assert [one.getpixel((4, 4)) for one in read_frames(content, "a")] == [BLUE, (0, 128, 0)]
    exif = Image.Exif()
    exif[0x0112] = 6
    lying = [Image.fromarray(np.ascontiguousarray(STORED[6])), Image.new("RGB", (96, 48), "red")]
    content = file_of(lying[0], "WEBP", save_all=True, append_images=lying[1:], exif=exif, lossless=True)
    assert [one.size for one in read_frames(content, "a")] == [(48, 96)] * 2


# --- limits, and what is no file -----------------------------------------------------------------------------------


def bomb(side: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


def test_limits_of_images():
    for side in (13000, 20000, 2**30):
        with pytest.raises(InputError, match="a bomb has more than 134217728 pixels"):
            image_size(io.BytesIO(bomb(side)), "a bomb")
    text = zlib.compress(b"a" * 2**24)
    body = b"Comment\0\0" + text
    chunk = struct.pack(">I", len(body)) + b"zTXt" + body + struct.pack(">I", zlib.crc32(b"zTXt" + body))
    content = file_of(UPRIGHT)
    with pytest.raises(InputError, match="is corrupt"):
        image_size(io.BytesIO(content[:33] + chunk + content[33:]), "a text")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"])
def test_what_breaks_off_is_named(kind):
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    content = file_of(noise, kind)
    for length in (0, 5, 20, len(content) // 2):
        with pytest.raises(InputError, match=r"^a file is "):
            read_image(io.BytesIO(content[:length]), "a file")


def test_what_is_no_file_is_named_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "empty").touch()
    for name, words in {
        "pipe": "x is a pipe, not a file",
        "folder": "x is a folder, not a file",
        "link": "x is a link to a file that is not there",
        "loop": "x is a link to a file that is not there",
        "empty": "x is empty",
        "nothing": r"cannot read x \(No such file",
        "a\0b": "cannot read x",
    }.items():
        with pytest.raises(InputError, match=words):
            open_file(tmp_path / name, "x")
    with pytest.raises(InputError, match="is a device"):
        open_file("/dev/zero", "x")
    (tmp_path / "file").write_bytes(bytes(range(100)))
    with pytest.raises(InputError, match="has 100 bytes, more than 10"):
        open_file(tmp_path / "file", "x", 10)
    with open_file(tmp_path / "file", "x") as file:
        assert file.read() == bytes(range(100))


# --- videos ------------------------------------------------------------------------------------------------------


def mp4_of(frame: np.ndarray, matrix: tuple[int, ...] | None = None, count: int = 3, **codec: Any) -> bytes:
    av = pytest.importorskip("av")
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=8, options={"crf": "4"})
        stream.width, stream.height, stream.pix_fmt = frame.shape[1], frame.shape[0], "yuv420p"
        for name, value in codec.items():
            setattr(stream.codec_context, name, value)
        for _ in range(count):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode())
    content = bytearray(out.getvalue())
    if matrix is not None:
        place = content.index(b"tkhd") + 44
        a, b, c, d = (value << 16 for value in matrix)
        content[place : place + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    return bytes(content)


# Display matrices, and how a video is stored that they show upright.
MATRICES = {
    (1, 0, 0, 1): 1,
    (0, 1, -1, 0): 6,
    (-1, 0, 0, -1): 3,
    (0, -1, 1, 0): 8,
    (-1, 0, 0, 1): 2,
    (1, 0, 0, -1): 4,
    (0, 1, 1, 0): 5,
    (0, -1, -1, 0): 7,
}


@pytest.mark.parametrize("matrix", MATRICES)
def test_videos_are_upright(matrix):
    content = mp4_of(STORED[MATRICES[matrix]], matrix)
    frame = np.asarray(read_frames(content, "a video", 1)[0])
    assert frame.shape == (96, 48, 3)
    assert close(frame[10, 24], RED, 8)
    assert close(frame[85, 24], BLUE, 8)
    assert frame_size(io.BytesIO(content), "a video") == (96, 48)


def test_a_video_turned_otherwise_is_refused():
    with pytest.raises(InputError, match="other than right angles"):
        read_frames(mp4_of(UPRIGHT, (1, 1, -1, 1)), "a video")


def test_pixels_of_videos_are_square():
    content = mp4_of(UPRIGHT, sample_aspect_ratio=2)
    assert read_frames(content, "a video", 1)[0].size == (96, 96)
    assert frame_size(io.BytesIO(content), "a video") == (96, 96)


def test_videos_that_cannot_be_shown():
    for content, words in (
        (b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n", "read as a video"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "read as a video"),
        (mp4_of(UPRIGHT, color_trc=16), r"is HDR \(PQ\)"),
        (b"\0\0\0\x18ftypisom" + b"\0" * 400, "read as a video|holds no"),
    ):
        with pytest.raises(InputError, match=words):
            read_frames(content, "a video")
    with pytest.raises(InputError, match="has more than 10000 pixels"):
        read_frames(mp4_of(UPRIGHT), "a video", most_pixels=10_000)


# --- the same reader everywhere ------------------------------------------------------------------------------------


def test_a_mask_that_the_transformer_cannot_use_is_refused(tmp_path):
    info = find_model("emoji-sd3")
    Image.new("RGB", (64, 64)).save(tmp_path / "image.png")
    files = tuple(input_picture(role, tmp_path / "image.png") for role in ("image", "mask"))
    with pytest.raises(InputError, match=r"--mask: .* of 16 or 33 input channels, and this model's has 8"):
        check_content(job_for(info, PictureRequest(prompt="a red fox"), tmp_path, files=files), info, 1)
    check_content(job_for(info, PictureRequest(prompt="a red fox"), tmp_path, files=files[:1]), info, 1)
