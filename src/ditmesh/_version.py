"""Versions, where neither torch nor anything else has to be imported to know them."""

from __future__ import annotations

from functools import cache

__version__ = "0.1.0"


def library_versions(names: tuple[str, ...] = ("torch", "diffusers", "transformers")) -> dict[str, str]:
    """Versions of Python, ditmesh, and those of ``names`` that are installed."""
    return dict(_versions(names))


@cache
def _versions(names: tuple[str, ...]) -> dict[str, str]:
    # Each looks through the installed packages, and the receipt of every image names them.
    import platform
    from importlib.metadata import PackageNotFoundError, version

    versions = {"python": platform.python_version(), "ditmesh": __version__}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
