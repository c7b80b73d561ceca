"""Tries the oldest or the newest set of packages that pyproject.toml allows (`make oldest`, `make newest`), or the
newest with diffusers' development version (`make development`).

An empty virtual environment is filled from names alone: for the oldest set every named package is at its lower bound.
In it, outside the checkout, the wheel imports all of its modules, generates on two ranks, verifies five configurations,
trains a LoRA of three steps and draws with it, and serves one request.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EXTRAS = ("lora", "train", "t5", "serve", "video", "data")
DEVELOPMENT = "diffusers @ https://github.com/huggingface/diffusers/archive/refs/heads/main.tar.gz"
CONFIGURATIONS = ("ulysses=2", "ring=2", "cfg=2", "tensor=2", "pipe=2")
MAX_COMMAND_SECONDS = 1500
MAX_READY_SECONDS = 300

# Fails with all that cannot be imported, and with what foreign warnings say.
IMPORT_ALL = """
import importlib, pkgutil, sys, ditmesh
failed = []
names = [module.name for module in pkgutil.walk_packages(ditmesh.__path__, "ditmesh.")]
# Of extras that are not installed: Ray.
names = [name for name in names if not name.endswith("__main__") and name not in ("ditmesh.ray_serve",)]
for name in names:
    try:
        importlib.import_module(name)
    except BaseException as error:
        failed.append(f"{name}: {type(error).__name__}: {error}")
print(f"{len(names)} modules from {ditmesh.__path__[0]}, {len(failed)} fail", *failed, sep="\\n  ")
sys.exit(bool(failed))
"""

RUN_FILE = """
pretrained_model_name_or_path: emoji-sd3
output_dir: run
data: {train_data_dir: data, resolution: 64, max_sequence_length: 16}
optimizer: {max_train_steps: 3, train_batch_size: 2}
lora: {rank: 4}
"""


class EnvironmentMistake(Exception):
    """A step that does not work in an environment."""


def lowest_versions(project: dict[str, Any], extras: tuple[str, ...] = EXTRAS) -> list[str]:
    """The named packages at their lower bounds, as lines of a constraints file.

    Args:
        project: the table of that name in pyproject.toml.
        extras: whose packages are meant besides the core's.
    """
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    lines: dict[str, str] = {}
    for requirement in (line for lines_of in lists for line in lines_of):
        match = re.fullmatch(r"(?P<name>[\w.-]+)>=(?P<bound>[\w.]+)", requirement)
        if match is None:
            raise EnvironmentMistake(f"{requirement!r} in pyproject.toml has no plain lower bound, such as name>=1.2")
        line = f"{match['name']}=={match['bound']}"
        if lines.setdefault(match["name"], line) != line:
            raise EnvironmentMistake(f"{match['name']} has two lower bounds in pyproject.toml")
    return sorted(lines.values())


class Environment:
    """A virtual environment and an empty folder in which its commands run.

    Args:
        folder: of both; an environment that is there is taken as it is.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.work = folder, folder / "work"
        self.programs = folder / "venv" / "bin"
        self.work.mkdir(parents=True, exist_ok=True)

    def make(self, lines: list[str]) -> None:
        """Install the wheel of this checkout with its extras; ``lines``: of a constraints file."""
        if not (self.programs / "python").exists():
            self.call(sys.executable, "-m", "venv", self.folder / "venv")
        constraints = self.folder / "constraints.txt"
        constraints.write_text("\n".join(lines) + "\n", encoding="utf-8")
        sources = (ROOT, ROOT / "src" / "ditmesh" / "zoo")
        self.call(self.programs / "python", *PIP[1:], "wheel", "--no-deps", "-w", self.folder, *sources)
        (wheel,), (models,) = self.folder.glob("ditmesh-*.whl"), self.folder.glob("ditmesh_zoo-*.whl")
        wanted = f"ditmesh[{','.join(EXTRAS)}] @ {wheel.as_uri()}"
        # The newest: what an earlier use of the folder has left is upgraded.
        more = ["--upgrade", "--upgrade-strategy", "eager"] if not lines else []
        self.call(self.programs / "python", *PIP[1:], "install", *more, "-c", constraints, wanted, models)
        self.call(self.programs / "python", *PIP[1:], "check")
        print(self.call(self.programs / "python", "-m", "pip", "list", "--format=freeze"))

    def call(self, *command: str | Path, seconds: float = MAX_COMMAND_SECONDS) -> str:
        """What a command that has to succeed printed.

        Raises:
            EnvironmentMistake: it failed or took too long, with the end of its output.
        """
        words = [str(word) for word in command]
        with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
            process = subprocess.Popen(
                words, cwd=self.work, env=self._variables(), stdout=output, stderr=subprocess.STDOUT, text=True
            )
            try:
                code: int | str = process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()
                code = f"nothing within {seconds:g} s"
            output.seek(0)
            text = output.read()
        if code != 0:
            raise EnvironmentMistake(f"{' '.join(words)} ended with {code}:\n{text[-4000:]}")
        return text

    def _variables(self) -> dict[str, str]:
        alone = {"PYTHONPATH": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        return {**os.environ, **alone, "PATH": f"{self.programs}{os.pathsep}{os.environ['PATH']}"}

    def try_all(self) -> None:
        """Each step that a newcomer takes, with its time.

        Raises:
            EnvironmentMistake: one does not work.
        """
        for name in ("modules", "generate", "verify", "train", "serve"):
            began = time.monotonic()
            text = getattr(self, f"try_{name}")()
            print(f"{name}: works, {time.monotonic() - began:.0f} s\n{text.strip()}\n", flush=True)

    def try_modules(self) -> str:
        return self.call(self.programs / "python", "-c", IMPORT_ALL)

    def try_generate(self) -> str:
        return self.own_lines("ditmesh", "generate", "a red fox", "--devices", "2", "--cfg", "2", "--out", "two")

    def own_lines(self, *words: str) -> str:
        """What a command prints, which has to be without Python's warnings of other packages."""
        text = self.call(*words)
        if warnings := [line for line in text.splitlines() if re.search(r"\wWarning\b|deprecated", line)]:
            raise EnvironmentMistake(f"{' '.join(words)} prints warnings of other packages:\n" + "\n".join(warnings))
        return text

    def try_verify(self) -> str:
        return self.call("ditmesh", "verify", *CONFIGURATIONS, "--steps", "2")

    def try_train(self) -> str:
        data = self.work / "data"
        self.call("ditmesh", "generate", "a cactus", "a pizza", "--devices", "2", "--steps", "2", "--out", data)
        for image in data.glob("*.png"):
            image.with_suffix(".txt").write_text("an emoji", encoding="utf-8")
        (self.work / "run.yaml").write_text(RUN_FILE, encoding="utf-8")
        text = self.own_lines("ditmesh", "train", "run.yaml", "--devices", "2")
        words = ["--devices", "2", "--steps", "2", "--out", "adapted"]
        return text + self.own_lines("ditmesh", "generate", "an emoji", "--lora", "run/lora", *words)

    def try_serve(self) -> str:
        log = self.work / "serve.log"
        command = ["ditmesh", "serve", "--devices", "2", "--cfg", "2", "--port", "0", "--folder", "served"]
        with log.open("w", encoding="utf-8") as output:
            server = subprocess.Popen(
                command, cwd=self.work, env=self._variables(), stdout=output, stderr=subprocess.STDOUT
            )
        try:
            url = self._url(server, log)
            program = f"import ditmesh; print(ditmesh.Client({url!r}).generate('a red apple', steps=2)[0].size)"
            return self.call("python", "-c", program)
        except EnvironmentMistake as error:
            raise EnvironmentMistake(f"{error}\nthe server said:\n{log.read_text(encoding='utf-8')[-4000:]}") from None
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)

    def _url(self, server: subprocess.Popen[bytes], log: Path) -> str:
        limit = time.monotonic() + MAX_READY_SECONDS
        while time.monotonic() < limit and server.poll() is None:
            if match := re.search(r"http://127\.0\.0\.1:\d+", log.read_text(encoding="utf-8")):
                return match[0]
            time.sleep(0.5)
        raise EnvironmentMistake("`ditmesh serve` names no address")


PIP = ("python", "-m", "pip", "--quiet", "--disable-pip-version-check")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("which", choices=("oldest", "newest", "development"))
    parser.add_argument("--folder", type=Path, help="Keep the environment there, or take the one that is there.")
    parser.add_argument("--only", nargs="+", help="Only these steps, of an environment that is there.")
    options = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    with tempfile.TemporaryDirectory(prefix=f"ditmesh-{options.which}-") as temporary:
        environment = Environment((options.folder or Path(temporary)).absolute())
        try:
            if options.only:
                for name in options.only:
                    print(getattr(environment, f"try_{name}")(), flush=True)
            else:
                lines = {"oldest": lowest_versions(project), "newest": [], "development": [DEVELOPMENT]}
                environment.make(lines[options.which])
                environment.try_all()
        except EnvironmentMistake as error:
            print(f"{options.which}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
