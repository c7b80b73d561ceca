"""The packages that ditmesh needs, as its own metadata names them: lower bounds, and the extras that bring others."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version

from .errors import InputError

PACKAGE = __package__ or "ditmesh"

# Extras of people who use ditmesh, and not of those who develop it.
EXTRAS = ("lora", "train", "t5", "serve", "video", "data", "ray", "ray-serve", "zoo")


def install_line(extra: str) -> str:
    """The command that installs all packages of an extra; ditmesh itself is there already, and is not looked up."""
    return f"pip install '{PACKAGE}[{extra}]'"


def not_installed(what: str, package: str, extra: str) -> str:
    """The sentence about ``what``, for which a package of an extra is missing."""
    return f"{what} needs {package}, which is not installed; {install_line(extra)}"


def outdated(extras: tuple[str, ...] = EXTRAS) -> list[str]:
    """A sentence for each installed package that is older than ditmesh needs.

    ``extras``: whose packages are looked at besides those that are always needed. One that is not installed is none of
    the sentences.
    """
    from packaging.requirements import Requirement
    from packaging.version import Version

    try:
        lines = requires(PACKAGE) or []
    except PackageNotFoundError:
        # A folder on the path, installed by nothing.
        return []
    sentences: dict[str, str] = {}
    for wanted in map(Requirement, lines):
        marker = wanted.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        try:
            release = version(wanted.name)
        except PackageNotFoundError:
            continue
        # Builds of vendors have versions such as 2.9.0a0+nv25.9, which come before 2.9.0.
        if not wanted.specifier.contains(Version(release).base_version, prereleases=True):
            bound = f"{wanted.name}{wanted.specifier}"
            sentences[wanted.name] = f"{wanted.name} {release} is too old for ditmesh; pip install '{bound}'"
    return list(sentences.values())


def check_versions(*extras: str) -> None:
    """Refuse an environment with packages that are too old, before they fail in words of their own.

    `InputError`: naming all of them.
    """
    if sentences := outdated(extras):
        raise InputError(". ".join(sentences))
