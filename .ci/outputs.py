"""What two versions of ditmesh answer: exit codes, JSON of the commands, and HTTP responses of a server, compared.

    python .ci/outputs.py ../older/src          # another version against the src/ beside this file
    python .ci/outputs.py ../older/src inspect  # only cases with this word in their name

Seconds, speeds, versions, paths and names of the run are left out; other numbers agree to 1e-4. A line is printed for
each difference, with its place in the JSON, and the exit code says whether there was any: whether a difference is meant
is for the reader, and for the change log.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SMALL = ("--size", "64x64", "--steps", "3", "--threads", "1")
TWO = ("--devices", "2")
# Name of a case: the command line. {out} is a folder of the case, {made} that of the case "generate".
COMMANDS: dict[str, tuple[str, ...]] = {
    "generate": ("generate", "a red fox", *SMALL, "--out", "{out}", "--json=full"),
    "generate short": ("generate", "a red fox", "a cactus", *SMALL, "--out", "{out}", "--json"),
    "generate cfg": ("generate", "a red fox", *SMALL, *TWO, "--cfg", "2", "--out", "{out}", "--json=full"),
    "generate displaced": (
        *("generate", "a red fox", *SMALL, *TWO, "--ring", "2", "--exchange", "displaced", "--warmup", "1"),
        *("--out", "{out}", "--json=full"),
    ),
    "generate img2img": (
        *("generate", "a red fox", *SMALL, "--image", "{made}/a-red-fox-0.png", "--strength", "0.7"),
        *("--out", "{out}", "--json=full"),
    ),
    "generate no model": ("generate", "a", "--model", "emoji-sd4", "--json", "--out", "{out}"),
    "generate no steps": ("generate", "a", "--steps", "0", "--json", "--out", "{out}"),
    "generate no head": ("generate", "a", "--devices", "4", "--ulysses", "4", "--json", "--out", "{out}"),
    "generate no prompt": ("generate", "--json", "--out", "{out}"),
    "replay": ("replay", "{made}/a-red-fox-0.png", "--json"),
    "verify": ("verify", "cfg=2", *SMALL, "--json"),
    "plan": ("plan", "emoji-sd3", *TWO, "--json"),
    "plan flux": ("plan", "flux.1-dev", "--devices", "4", "--hardware", "h100", "--json"),
    "plan video": ("plan", "wan-14b", "--devices", "8", "--hardware", "h100", "--frames", "49", "--stale", "--json"),
    "plan no part": ("plan", "flux.1-dev", "--devices", "4", "--hardware", "h1000", "--json"),
    "inspect": ("inspect", "emoji-sd3", "--json"),
    "inspect check": ("inspect", "emoji-sd3", "--check", "--json"),
    "inspect memory": ("inspect", "emoji-sd3", "--config", "ulysses=2", "--memory", "--json"),
    "inspect explain": ("inspect", "emoji-sd3", "--config", "ring=2", "--explain", "--json"),
    "doctor": ("doctor", "--json"),
}
JOB = {"prompt": "a red fox", "steps": 2, "seed": 1}
# Name of a case: method, path, body. {job} is the id of the job that "post job" has made.
REQUESTS: dict[str, tuple[str, str, Any]] = {
    "healthz": ("GET", "/healthz", None),
    "openapi": ("GET", "/openapi.json", None),
    "models": ("GET", "/v1/models", None),
    "state": ("GET", "/v1/state", None),
    "post job": ("POST", "/v1/jobs", JOB),
    "job": ("GET", "/v1/jobs/{job}", None),
    "jobs": ("GET", "/v1/jobs", None),
    "openai": ("POST", "/v1/images/generations", {"prompt": "a cactus", "n": 1, "response_format": "b64_json"}),
    "no model": ("POST", "/v1/jobs", {**JOB, "model": "emoji-sd4"}),
    "no field": ("POST", "/v1/jobs", {**JOB, "stepz": 4}),
    "no steps": ("POST", "/v1/jobs", {**JOB, "steps": 0}),
    "no job": ("GET", "/v1/jobs/0123", None),
    "no route": ("GET", "/v2/jobs", None),
    "metrics": ("GET", "/metrics", None),
}
# Keys of values that differ from run to run, or say which version ran.
VARIES = re.compile(
    r"second|_ms$|time|elapsed|speed|version|path|file|folder|python|platform|host|pid|port|memory|bytes|_at$|created|"
    r"^id$|^out$|environment|expires|rate|load|cpu|threads|latency|bandwidth|progress|waiting|uptime|commit|package|peak|free|url|drift|eta"
)
CLOSE = 1e-4


def differences(old: Any, new: Any, place: str = "", varies: bool = False) -> Iterator[str]:
    """What differs between two values of JSON, one line a place; of values that vary, their keys and types."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old.keys() | new.keys():
            here = f"{place}.{key}"
            if key not in old or key not in new:
                yield f"{here} is {'new' if key not in old else 'gone'}"
            else:
                yield from differences(old[key], new[key], here, varies or bool(VARIES.search(key)))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, pair in enumerate(zip(old, new, strict=True)):
            yield from differences(*pair, f"{place}[{number}]", varies)
    elif varies and type(old) is type(new) and not isinstance(old, dict | list):
        return
    elif isinstance(old, float) and isinstance(new, float | int):
        if not math.isclose(old, new, rel_tol=CLOSE, abs_tol=CLOSE):
            yield f"{place}: {old} has become {new}"
    elif old != new:
        yield f"{place}: {str(old)[:300]!r} has become {str(new)[:300]!r}"


def environment(source: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "COLUMNS": "120", "NO_COLOR": "1"}


def command(source: Path, words: tuple[str, ...], out: Path, made: Path) -> dict[str, Any]:
    """Exit code and JSON of a command line; the last line of what it has said where it fails."""
    line = [word.format(out=out, made=made) for word in words]
    ran = subprocess.run(
        [sys.executable, "-m", "ditmesh", *line], env=environment(source), capture_output=True, text=True, timeout=600
    )
    said = ran.stderr.replace(str(out), "OUT").replace(str(made), "MADE")
    return {"exit": ran.returncode, "json": parsed(ran.stdout), "error": said.strip() if ran.returncode else ""}


def parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        # Metrics: the names and labels; other text without its numbers.
        return sorted({re.sub(r"[\d.e+-]+$", "", line).strip() for line in text.splitlines()})


def responses(source: Path, folder: Path, wanted: str) -> dict[str, dict[str, Any]]:
    """Status and body of every request to a server that has loaded its model."""
    started = subprocess.Popen(
        [sys.executable, "-m", "ditmesh", "serve", "--port", "0", "--folder", str(folder), "--threads", "1"],
        env=environment(source),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert started.stdout is not None
        said = ""
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", said)):
            line = started.stdout.readline()
            if not line:
                raise SystemExit(f"the server of {source} has not started:\n{said}")
            said += line
        url, answers, job = found.group(), {}, ""
        while asked(url, "GET", "/readyz", None)[0] != 200:
            time.sleep(0.5)
        for name, (method, path, body) in REQUESTS.items():
            if wanted in f"http {name}" or name == "post job":
                status, text = asked(url, method, path.format(job=job), body)
                answers[f"http {name}"] = {"status": status, "json": parsed(text)}
                if name == "post job":
                    job = json.loads(text)["id"]
                    while json.loads(asked(url, "GET", f"/v1/jobs/{job}", None)[1])["status"] in ("queued", "running"):
                        time.sleep(0.2)
        return answers
    finally:
        started.terminate()
        started.wait(60)


def asked(url: str, method: str, path: str, body: Any) -> tuple[int, str]:
    """Status and text of a response."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except urllib.error.URLError:
        return 0, ""


def main() -> int:
    older, wanted = Path(sys.argv[1]).resolve(), " ".join(sys.argv[2:])
    if not (older / "ditmesh" / "__init__.py").is_file():
        raise SystemExit(f"{older} holds no ditmesh; give the src folder of another version")
    found, compared = 0, 0

    def compare(name: str, old: dict[str, Any], new: dict[str, Any]) -> None:
        nonlocal found, compared
        every = sorted(differences(old, new))
        found, compared = found + len(every), compared + 1
        print(f"{name}: {'the same' if not every else f'{len(every)} differ'}", flush=True)
        for line in every:
            print(f"    {line}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        sources = (older, ROOT / "src")
        for name, words in COMMANDS.items():
            if wanted in name or name == "generate":
                answers = []
                for number, source in enumerate(sources):
                    out = Path(folder, str(number), name.replace(" ", "-"))
                    answers.append(command(source, words, out, Path(folder, str(number), "generate")))
                compare(name, *answers)
        if not wanted or wanted.startswith("http"):
            old, new = (
                responses(source, Path(folder, str(number), "served"), wanted) for number, source in enumerate(sources)
            )
            for name in old:
                compare(name, old[name], new[name])
    print(f"{compared} answers compared, {found} differences")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())
