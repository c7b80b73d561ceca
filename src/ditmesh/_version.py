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


def source() -> str:
    """The origin of this code: the git commit of the checkout that the package lies in, else its version.

    Such as ``commit 6b0bc63d4f21, changed since``. A folder that git ignores inside of another checkout, as virtual
    environments are, is none.
    """
    import os
    import subprocess
    from pathlib import Path

    folder = Path(__file__).parent
    # A hook's own repository is not the package's.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)
        commit = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", str(folder))
    except (OSError, subprocess.SubprocessError):
        return f"version {__version__}"
    return f"commit {commit}{', changed since' if changed else ''}"
