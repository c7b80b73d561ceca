"""All benchmarks by name: ``python benchmarks`` lists them, ``python benchmarks NAME [options]`` runs one."""

from __future__ import annotations

import ast
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Shared by the others.
SHARED = {"__main__", "comfyui_files", "harness", "machine", "open_loop"}


def benchmarks() -> dict[str, str]:
    """Every benchmark's name, and the first line of its docstring."""
    files = [path for path in HERE.glob("*.py") if path.stem not in SHARED]
    found = {path.stem: path for path in files} | {path.parent.name: path for path in HERE.glob("*/__main__.py")}
    lines = {}
    for name, path in sorted(found.items()):
        said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        lines[name] = said.partition("\n")[0]
    return lines


def main(words: Sequence[str]) -> None:
    """List the benchmarks, or run the one that is named first."""
    known = benchmarks()
    name = words[0] if words else ""
    if name in ("", "-h", "--help"):
        print("\n".join([__doc__ or "", "", *(f"{name:18}{line}" for name, line in known.items())]))
        return
    if name not in known:
        raise SystemExit(f"there is no benchmark {name!r}; use one of {', '.join(known)}")
    target = HERE / name if (HERE / name).is_dir() else HERE / f"{name}.py"
    # As if it had been called by itself: its own modules are found beside it.
    sys.argv = [str(target), *words[1:]]
    sys.path.insert(0, str(HERE))
    runpy.run_path(str(target), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
