"""The pictures and their captions: Fluent Emoji renders, fetched from npm, made small and kept in one array.

The pictures are Microsoft's Fluent Emoji (3-D style, MIT licence) as the npm package
``@lobehub/fluent-emoji-3d`` carries them: 256x256 WebP with transparency, named by code point. Which of them
the model learns, and under which words, is the table ``captions.txt`` beside this file.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

PACKAGE = "@lobehub/fluent-emoji-3d"
VERSION = "1.1.0"
TARBALL = "lobehub-fluent-emoji-3d-1.1.0.tgz"

TABLE = Path(__file__).with_name("captions.txt")
CLASSES = Path(__file__).with_name("classes.txt")

# Left out of the wider set that only the autoencoder sees: skin tones, joined sequences, flags, key caps.
_NEAR_COPIES = re.compile(r"1f3f[b-f]|200d|1f1[ef]|20e3|1f3f4")


@dataclass(frozen=True)
class Entry:
    """One picture of the training set: its code points (file name) and the ways to name it."""

    code: str
    captions: tuple[str, ...]

    @property
    def caption(self) -> str:
        """The words under which the picture is counted and tested."""
        return self.captions[0]


@dataclass(frozen=True)
class Pictures:
    """The training pictures, ``uint8`` RGB on white.

    ``chosen`` is (number of entries, size, size, 3), in the order of the entries; ``wider`` is
    (any number, size, size, 3): further emoji that only the autoencoder is trained on.
    """

    entries: tuple[Entry, ...]
    chosen: np.ndarray
    wider: np.ndarray


def read_entries(table: Path = TABLE) -> tuple[Entry, ...]:
    """Reads a caption table: one picture a line, ``code | caption | other caption ...``; ``#`` is a comment.

    Raises ValueError, naming the line, where a line has no caption or repeats an earlier code or caption.
    """
    entries: list[Entry] = []
    seen: set[str] = set()
    for number, line in enumerate(table.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        code, *captions = (part.strip() for part in line.split("|"))
        if not captions or not all(captions):
            raise ValueError(f"{table}:{number}: expected 'code | caption', got {line!r}")
        for word in (code, *captions):
            if word in seen:
                raise ValueError(f"{table}:{number}: {word!r} appears twice")
            seen.add(word)
        entries.append(Entry(code, tuple(captions)))
    return tuple(entries)


def fetch(folder: Path) -> Path:
    """Makes sure the npm package's archive lies in ``folder``; returns its path.

    An archive that is already there is used as it is, so a machine without network can be given one.
    Raises RuntimeError when npm is missing or fails.
    """
    archive = folder / TARBALL
    if archive.exists():
        return archive
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError(
            f"npm was not found, and {archive} does not exist. Install Node.js, or download "
            f"{PACKAGE}@{VERSION} from the npm registry yourself and put the .tgz there."
        )
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [npm, "pack", f"{PACKAGE}@{VERSION}", "--silent"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0 or not archive.exists():
        raise RuntimeError(f"`npm pack {PACKAGE}@{VERSION}` failed ({done.returncode}): {done.stderr.strip()}")
    return archive


def flatten(picture: Image.Image, size: int) -> np.ndarray:
    """Lays a picture with transparency on white and reduces it to (size, size, 3) ``uint8``.

    The transparency is resolved before the size is reduced, with Lanczos filtering, so edges stay clean.
    """
    picture = picture.convert("RGBA")
    ground = Image.new("RGBA", picture.size, "white")
    ground.alpha_composite(picture)
    return np.asarray(ground.convert("RGB").resize((size, size), Image.Resampling.LANCZOS), dtype=np.uint8)


def build(archive: Path, size: int = 64, entries: tuple[Entry, ...] | None = None) -> Pictures:
    """Reads the pictures out of the npm archive.

    Raises ValueError when the archive lacks one of the entries' pictures.
    """
    entries = read_entries() if entries is None else entries
    small: dict[str, np.ndarray] = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            name = Path(member.name)
            if name.suffix != ".webp":
                continue
            code = name.stem
            if _NEAR_COPIES.search(code) and all(code != entry.code for entry in entries):
                continue
            data = tar.extractfile(member)
            if data is not None:
                small[code] = flatten(Image.open(io.BytesIO(data.read())), size)
    missing = [entry.code for entry in entries if entry.code not in small]
    if missing:
        raise ValueError(f"{archive} has no picture for {', '.join(missing)}")
    chosen = np.stack([small.pop(entry.code) for entry in entries])
    wider = np.stack([small[code] for code in sorted(small)]) if small else chosen[:0]
    return Pictures(entries, chosen, wider)


def load(folder: Path, size: int = 64, table: Path = TABLE) -> Pictures:
    """Fetches and reads the training set; the reduced pictures are cached in ``folder`` as one ``.npz``."""
    entries = read_entries(table)
    cache = folder / f"{'pictures' if table == TABLE else table.stem}-{size}.npz"
    if cache.exists():
        with np.load(cache) as arrays:
            if list(arrays["codes"]) == [entry.code for entry in entries]:
                return Pictures(entries, arrays["chosen"], arrays["wider"])
    pictures = build(fetch(folder), size, entries)
    codes = np.array([entry.code for entry in entries])
    np.savez_compressed(cache, codes=codes, chosen=pictures.chosen, wider=pictures.wider)
    return pictures
