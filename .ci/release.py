"""Builds what a release consists of, and tries it; the command is `make release-check`.

The sdists and the wheels of ditmesh and of ditmesh-zoo are built from the committed files, the wheels from the sdists.
Their metadata and contents are compared with the repository. In a fresh virtual environment the wheel of the code says
what to install for an embedded model, and with both wheels it generates an image on two ranks, from which
`ditmesh replay` has to get the same pixels. The files of a successful check are left in the folder given by --out.
"""

from __future__ import annotations

import argparse
import datetime
import email
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
MARKS = {"images", "bits", "interface"}
# Of the wheels of the code and of the models; PyPI takes 100 MB a file.
MOST_BYTES, MOST_MODEL_BYTES = 2_000_000, 60_000_000
ZOO = Path("src", "ditmesh", "zoo")
HEADING = re.compile(r"^## (?P<version>\S+)(?: \((?P<date>[^)]*)\))?$", re.MULTILINE)


class ReleaseError(Exception):
    """What has to be mended before a release."""


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """Run a command that has to succeed, and return what it printed.

    Raises:
        ReleaseError: if it fails, with the end of its output.
    """
    words = [str(word) for word in command]
    result = subprocess.run(
        words, cwd=cwd, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if result.returncode:
        raise ReleaseError(f"{' '.join(words)} exited with {result.returncode}:\n{result.stdout[-3000:]}")
    return result.stdout


def changelog_mistakes(text: str, version: str) -> list[str]:
    """What is wrong with a change log whose newest release should be ``version``."""
    headings = list(HEADING.finditer(text))
    if not headings or headings[0]["version"] != "Unreleased" or headings[0]["date"]:
        return ["CHANGELOG.md begins with '## Unreleased', without a date"]
    found: list[str] = []
    releases = headings[1:]
    if not releases or releases[0]["version"] != version:
        found.append(f"the newest release in CHANGELOG.md is not '## {version} (YYYY-MM-DD)'")
    for heading in releases:
        try:
            datetime.date.fromisoformat(heading["date"] or "")
        except ValueError:
            found.append(f"the heading {heading[0]!r} of CHANGELOG.md has no date such as (2026-11-25)")
    for entry in re.findall(r"^\* (.+)$", text[headings[0].start() :], re.MULTILINE):
        marks = re.match(r"((?:\*\*\[\w+\]\*\* ?)*)", entry)
        assert marks is not None
        if unknown := ", ".join(sorted(set(re.findall(r"\[(\w+)\]", marks[0])) - MARKS)):
            found.append(f"CHANGELOG.md marks an entry with {unknown}; the marks are images, bits, interface")
    return found


def version_of(source: Path) -> str:
    text = (source / "src" / "ditmesh" / "_version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    assert match is not None
    return match[1]


def version_mistakes(source: Path) -> list[str]:
    """What does not name one version: the package, the citation, the change log."""
    version = version_of(source)
    found = changelog_mistakes((source / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        found.append(f"the version {version} of src/ditmesh/_version.py is not one of a release, such as 0.1.0")
    cited = str(yaml.safe_load((source / "CITATION.cff").read_text(encoding="utf-8"))["version"])
    if cited != version:
        found.append(f"CITATION.cff is of version {cited}, the package of {version}")
    models = tomllib.loads((source / ZOO / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    if models != version:
        found.append(f"{ZOO}/pyproject.toml is of version {models}, the package of {version}")
    return found


def model_files(source: Path) -> set[Path]:
    """The committed files of the embedded models, relative to their folder."""
    folder = source / ZOO
    paths = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    return {path for path in paths if len(path.parts) > 1 and path.parts[0] != "__pycache__"}


def model_mistakes(source: Path, wheel: Path) -> list[str]:
    """How the wheel of the models differs from what is committed."""
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if not name.endswith("/") and ".dist-info/" not in name}
    models = {f"ditmesh_zoo/{path.as_posix()}" for path in model_files(source)}
    found = [f"{wheel.name} lacks {name}" for name in sorted(models - names)]
    found += [f"{wheel.name} has {name}, which is not committed" for name in sorted(names - models)]
    if (size := wheel.stat().st_size) > MOST_MODEL_BYTES:
        found.append(f"{wheel.name} has {size / 1e6:.1f} MB, more than {MOST_MODEL_BYTES / 1e6:.0f}")
    return found


def content_mistakes(source: Path, sdist: Path, wheel: Path) -> list[str]:
    """How the two files differ from the package that is committed."""
    version, found = version_of(source), []
    models = {source / ZOO / path for path in model_files(source)} | {source / ZOO / "pyproject.toml"}
    paths = {path for path in (source / "src" / "ditmesh").rglob("*") if path.is_file()} - models
    package = {str(path.relative_to(source / "src")) for path in paths}
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if not name.endswith("/")}
        about = f"ditmesh-{version}.dist-info"
        metadata = email.message_from_bytes(opened.read(f"{about}/METADATA"))
        found += [f"{wheel.name} lacks {about}/licenses/LICENSE"] * (f"{about}/licenses/LICENSE" not in names)
    inside = {name for name in names if not name.startswith(about)}
    found += [f"{wheel.name} lacks {name}" for name in sorted(package - inside)]
    found += [f"{wheel.name} has {name}, which is not committed" for name in sorted(inside - package)]
    if (size := wheel.stat().st_size) > MOST_BYTES:
        found.append(f"{wheel.name} has {size / 1e6:.1f} MB, more than {MOST_BYTES / 1e6:.0f}")
    if metadata["Version"] != version or metadata["License-Expression"] != "Apache-2.0":
        found.append(f"{wheel.name} is of version {metadata['Version']}, licence {metadata['License-Expression']}")
    found += [
        f"{wheel.name} requires {line} without a lower bound"
        for line in metadata.get_all("Requires-Dist", [])
        if not re.search(r">=|==", line)
    ]
    with tarfile.open(sdist) as opened:
        files = {name.split("/", 1)[1] for name in opened.getnames() if "/" in name}
    wanted = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt", "Makefile"}
    wanted |= {f"src/{name}" for name in package}
    return found + [f"{sdist.name} lacks {name}" for name in sorted(wanted - files)]


def try_wheels(wheel: Path, models: Path, folder: Path) -> None:
    """Install the wheels into a fresh environment, generate on two ranks, and replay the image.

    Raises:
        ReleaseError: if a command fails, or the package is imported from elsewhere.
    """
    run(sys.executable, "-m", "venv", folder / "venv")
    programs, empty = folder / "venv" / "bin", folder / "empty"
    pip = (programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "-c", ROOT / "constraints.txt", wheel)
    empty.mkdir()
    alone = {"PYTHONPATH": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    where = run(programs / "python", "-c", "import ditmesh; print(ditmesh.__file__)", cwd=empty, **alone).strip()
    if not where.startswith(str(folder)):
        raise ReleaseError(f"the fresh environment imports ditmesh from {where}")
    code = "from ditmesh import zoo\ntry:\n    zoo.path()\nexcept ValueError as error:\n    print(error)"
    sentence = run(programs / "python", "-c", code, cwd=empty, **alone).strip()
    if "pip install 'ditmesh[zoo]'" not in sentence:
        raise ReleaseError(f"without its wheel an embedded model is answered by {sentence!r}")
    run(*pip, "--no-deps", models)
    words = ["--devices", "2", "--cfg", "2", "--steps", "3", "--seed", "7", "--out", "outputs"]
    run(programs / "ditmesh", "generate", "a red fox", *words, cwd=empty, **alone)
    (image,) = empty.rglob("*.png")
    print(run(programs / "ditmesh", "replay", image, cwd=empty, **alone).strip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="Where the sdist and the wheel are left.")
    parser.add_argument("--no-try", action="store_true", help="Do not install the wheel.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ditmesh-release-") as temporary:
        source = Path(temporary) / "source"
        source.mkdir()
        run("git", "archive", "--output", source.with_suffix(".tar"), "HEAD")
        run("tar", "-xf", source.with_suffix(".tar"), "-C", source)
        found = version_mistakes(source)
        for project in (source, source / ZOO):
            run(sys.executable, "-m", "build", "--outdir", options.out, project)
        version = version_of(source)
        sdist, wheel = options.out / f"ditmesh-{version}.tar.gz", options.out / f"ditmesh-{version}-py3-none-any.whl"
        models = options.out / f"ditmesh_zoo-{version}-py3-none-any.whl"
        model_sdist = options.out / f"ditmesh_zoo-{version}.tar.gz"
        run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
        run(sys.executable, "-m", "twine", "check", model_sdist, models)
        found += content_mistakes(source, sdist, wheel) + model_mistakes(source, models)
        if found:
            raise ReleaseError("\n".join(found))
        if not options.no_try:
            try_wheels(wheel, models, Path(temporary))
    for file in (sdist, wheel, model_sdist, models):
        print(f"{file}  {file.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    try:
        main()
    except ReleaseError as error:
        sys.exit(str(error))
