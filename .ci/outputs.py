"""What two versions of ditmesh answer: exit codes, JSON of the commands, and HTTP responses of a server, compared.

    python .ci/outputs.py ../older/src          # another version against the src/ beside this file
    python .ci/outputs.py ../older/src inspect  # only cases with this word in their name

    python .ci/outputs.py ../older/src commands # only the command lines, without a server

Seconds, speeds, versions, paths and names of the run are left out; other numbers agree to 1e-4. A line is printed for
each difference, with its place in the JSON. A field that only the newer version has is no difference, nor are other
words of an error message, which are printed for the reader. Differences that are wanted are listed in `WANTED`, with
the reason of each; the exit code says whether there was any other.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
SMALL = ("--size", "64x64", "--steps", "3", "--seed", "0", "--threads", "1")
TWO = ("--devices", "2")
STUDY = ("study", "fox", "--model", "emoji-dit-s", "--devices", "2", "--steps", "3", "--sampler", "ddim", "--json")
TRAIN = ("train", "{run}", "--set", "output_dir={out}", "--threads", "1")
# Name of a case: the command line. {out} is a folder of the case, {made} that of the case "generate", {run} settings of
# a training run on what that has made, {file} a text file. A case with "stopped" in its name gets Ctrl-C when it has
# written its first file.
COMMANDS: dict[str, tuple[str, ...]] = {
    "generate": ("generate", "a red fox", *SMALL, "--out", "{out}", "--json"),
    "generate short": ("generate", "a red fox", "a cactus", *SMALL, "--out", "{out}", "--json"),
    "generate cfg": ("generate", "a red fox", *SMALL, *TWO, "--cfg", "2", "--out", "{out}", "--json"),
    "generate displaced": (
        *("generate", "a red fox", *SMALL, *TWO, "--ring", "2", "--set", "exchange=displaced"),
        *("--set", "warmup=fixed(1)", "--out", "{out}", "--json"),
    ),
    "generate img2img": (
        *("generate", "a red fox", *SMALL, "--image", "{made}/0000-a-red-fox-seed0.png", "--strength", "0.7"),
        *("--out", "{out}", "--json"),
    ),
    "generate no model": ("generate", "a", "--model", "emoji-sd4", "--json", "--out", "{out}"),
    "generate no steps": ("generate", "a", "--steps", "0", "--json", "--out", "{out}"),
    "generate no head": ("generate", "a", "--devices", "16", "--ulysses", "16", "--json", "--out", "{out}"),
    "generate no product": ("generate", "a", "--devices", "4", "--ulysses", "2", "--ring", "3", "--out", "{out}"),
    "generate no exchange": ("generate", "a", *TWO, "--ring", "2", "--set", "exchange=magic", "--out", "{out}"),
    "generate no policy": ("generate", "a", *TWO, "--ring", "2", "--set", "exchange=displaced", "--set", "warmup=1"),
    "generate no image": ("generate", "a", "--image", "{out}.png", "--json", "--out", "{out}"),
    "generate no folder": ("generate", "a", *SMALL, "--json", "--out", "{file}/images"),
    "generate no LoRA": ("generate", "a", "--lora", "{out}.safetensors", "--json", "--out", "{out}"),
    "generate no scheduler": ("generate", "a", "--scheduler", "FastScheduler", "--json", "--out", "{out}"),
    "generate no size": ("generate", "a", "--size", "33x64", "--json", "--out", "{out}"),
    "generate no number": ("generate", "a", "--steps", "many", "--json", "--out", "{out}"),
    "generate no option": ("generate", "a", "--stepz", "3", "--json", "--out", "{out}"),
    "generate no devices": ("generate", "a", "--devices", "0", "--json", "--out", "{out}"),
    "generate no config": ("generate", "a", "--config", "{out}.yaml", "--json", "--out", "{out}"),
    "generate bad config": ("generate", "a", "--config", "{file}", "--json", "--out", "{out}"),
    "generate no frames": ("generate", "a", "--frames", "9", "--json", "--out", "{out}"),
    "generate no memory": ("generate", "a", "--memory-limit", "0.001", "--json", "--out", "{out}"),
    "generate stopped": ("generate", "a red fox", *SMALL, "--num-images", "999", "--batch", "1", "--out", "{out}"),
    "generate stopped ranks": (
        *("generate", "a red fox", *SMALL, *TWO, "--ulysses", "2", "--num-images", "999", "--batch", "1"),
        *("--out", "{out}"),
    ),
    "generate no prompt": ("generate", "--json", "--out", "{out}"),
    "replay": ("replay", "{made}/0000-a-red-fox-seed0.png", "--out", "{out}", "--json"),
    "replay no file": ("replay", "{out}.png", "--json"),
    "verify": ("verify", "cfg=2", *SMALL, "--json"),
    "plan": ("plan", "emoji-sd3", *TWO, "--json"),
    "plan flux": ("plan", "flux.1-dev", "--devices", "4", "--hardware", "h100", "--json"),
    "plan video": ("plan", "wan-14b", "--devices", "8", "--hardware", "h100", "--frames", "49", "--stale", "--json"),
    "plan no model": ("plan", "emoji-sd4", *TWO, "--json"),
    "plan no part": ("plan", "flux.1-dev", "--devices", "4", "--hardware", "h1000", "--json"),
    "inspect": ("inspect", "emoji-sd3", "--json"),
    "layout": ("layout", "emoji-sd3", "--json"),
    "inspect no model": ("inspect", "emoji-sd4", "--json"),
    "memory no head": ("memory", "emoji-sd3", "--ulysses", "5", "--json"),
    "memory": ("memory", "emoji-sd3", "--ulysses", "2", "--json"),
    "doctor": ("doctor", "--json"),
    "doctor ranks": ("doctor", *TWO, "--json"),
    "verify no config": ("verify", "--json"),
    "verify itself": ("verify", "data=2", *SMALL, "--json"),
    "study": (*STUDY, "--warmup", "1,3", "--strategy", "displaced,naive", "--out", "{out}"),
    "study no strategy": (*STUDY, "--strategy", "magic", "--out", "{out}"),
    "replay no receipt": ("replay", "{run}", "--json"),
    "train": (*TRAIN, "--json"),
    "train ranks": (*TRAIN, *TWO, "--json"),
    "train sharded": (*TRAIN, *TWO, "--set", "model.sharding=fsdp", "--set", "output.checkpointing_steps=1", "--json"),
    "train lora": (*TRAIN, "--set", "lora.rank=2", "--json"),
    "train no setting": ("train", "{run}", "--set", "data.resolutoin=32", "--json"),
    "train no file": ("train", "{out}/none.yaml", "--json"),
    "train no number": (*TRAIN, "--set", "optimizer.learning_rate=fast", "--json"),
    "train no list": (*TRAIN, "--set", "optimizer.max_train_steps=[1, 2]", "--json"),
    "train no batch": (*TRAIN, "--set", "optimizer.train_batch_size=0", "--json"),
    "train bad file": ("train", "{file}", "--json"),
    "train no data": (*TRAIN, "--set", "data.train_data_dir={out}/none", "--json"),
    "train no model": (*TRAIN, "--set", "pretrained_model_name_or_path=emoji-sd4", "--json"),
    "train no folder": ("train", "{run}", "--set", "output_dir={file}/run", "--threads", "1", "--json"),
    "train no head": (*TRAIN, "--devices", "16", "--ulysses", "16", "--json"),
    "train no optimizer": (*TRAIN, "--set", "optimizer.name=Adamw9", "--json"),
    "train stopped": (
        *TRAIN,
        "--set",
        "optimizer.max_train_steps=100000",
        "--set",
        "output.checkpointing_steps=100000",
    ),
    "serve no model": ("serve", "--model", "emoji-sd4", "--port", "0", "--folder", "{out}"),
    "serve no port": ("serve", "--port", "99999", "--folder", "{out}"),
    "serve no keys": ("serve", "--port", "0", "--keys", "{out}.txt", "--folder", "{out}"),
    "serve no folder": ("serve", "--port", "0", "--folder", "{file}/queue"),
    "verify no axis": ("verify", "magic=2", *SMALL, "--json"),
    "verify no number": ("verify", "cfg=two", *SMALL, "--json"),
    "plan no devices": ("plan", "emoji-sd3", "--devices", "0", "--json"),
    "inspect no folder": ("inspect", "{out}", "--json"),
    "no command": ("generat", "a red fox"),
    "nothing": (),
    "help": ("--help",),
    "version": ("--version",),
}
RUN = """\
pretrained_model_name_or_path: emoji-sd3
output_dir: out
data:
  train_data_dir: {made}
  resolution: 64
  max_sequence_length: 16
optimizer:
  max_train_steps: 2
  train_batch_size: 1
  learning_rate: 1.0e-4
seed: 1
"""
JOB = {"prompt": "a red fox", "steps": 2, "seed": 1}
OPENAI = "/v1/images/generations"
# Name of a case: method, path, body; a tuple is the fields of a form and the name of a file in it. {job} is the id of
# the job that "post job" has made.
REQUESTS: dict[str, tuple[str, str, Any]] = {
    "healthz": ("GET", "/healthz", None),
    "readyz": ("GET", "/readyz", None),
    "page": ("GET", "/", None),
    "docs": ("GET", "/docs", None),
    "openapi": ("GET", "/openapi.json", None),
    "models": ("GET", "/v1/models", None),
    "model": ("GET", "/v1/models/emoji-sd3", None),
    "server": ("GET", "/v1/server", None),
    "server events": ("GET", "/v1/server/events", None),
    "post job": ("POST", "/v1/jobs", JOB),
    "job": ("GET", "/v1/jobs/{job}", None),
    "jobs": ("GET", "/v1/jobs", None),
    "job events": ("GET", "/v1/jobs/{job}/events", None),
    "job image": ("GET", "/v1/jobs/{job}/images/0", None),
    "job delete": ("DELETE", "/v1/jobs/{job}", None),
    "openai": ("POST", OPENAI, {**JOB, "prompt": "a cactus", "n": 1, "response_format": "b64_json"}),
    "openai url": ("POST", OPENAI, {**JOB, "n": 2, "response_format": "url", "output_format": "webp"}),
    "openai stream": ("POST", OPENAI, {**JOB, "stream": True, "partial_images": 1}),
    "edit": ("POST", "/v1/images/edits", ({**JOB, "strength": 0.9}, "image")),
    "edit no image": ("POST", "/v1/images/edits", (JOB, None)),
    "edit no file": ("POST", "/v1/images/edits", (JOB, "picture")),
    "edit no form": ("POST", "/v1/images/edits", JOB),
    "video": ("POST", "/v1/videos", JOB),
    "no video": ("GET", "/v1/videos/job_0123", None),
    "no video to delete": ("DELETE", "/v1/videos/job_0123", None),
    "no video's file": ("GET", "/v1/videos/job_0123/content", None),
    "no model": ("POST", "/v1/jobs", {**JOB, "model": "emoji-sd4"}),
    "no such model": ("GET", "/v1/models/emoji-sd4", None),
    "no field": ("POST", "/v1/jobs", {**JOB, "stepz": 4}),
    "no steps": ("POST", "/v1/jobs", {**JOB, "steps": 0}),
    "no size": ("POST", "/v1/jobs", {**JOB, "size": "33x64"}),
    "no LoRA": ("POST", "/v1/jobs", {**JOB, "loras": [{"name": "oil"}]}),
    "no input": ("POST", "/v1/jobs", {**JOB, "inputs": [{"role": "image", "digest": "0" * 64}]}),
    "no data": ("POST", "/v1/jobs", {**JOB, "inputs": [{"role": "image", "data": "a.png"}]}),
    "no prompt": ("POST", OPENAI, {"n": 1}),
    "no style": ("POST", OPENAI, {**JOB, "style": "vivid"}),
    "too many": ("POST", OPENAI, {**JOB, "n": 1000}),
    "no job": ("GET", "/v1/jobs/0123", None),
    "no job to delete": ("DELETE", "/v1/jobs/0123", None),
    "no job's events": ("GET", "/v1/jobs/0123/events", None),
    "no image": ("GET", "/v1/jobs/{job}/images/7", None),
    "no limit": ("GET", "/v1/jobs?limit=many", None),
    "no status": ("GET", "/v1/jobs?status=done", None),
    "no method": ("PUT", "/v1/jobs", JOB),
    "no route": ("GET", "/v2/jobs", None),
    "metrics": ("GET", "/metrics", None),
}
# Keys of values that differ from run to run, or say which version ran.
VARIES = re.compile(
    r"second|_ms$|time|elapsed|speed|version|path|file|folder|python|platform|host|pid|port|memory|bytes|_at$|created|"
    r"^id$|^out$|environment|expires|rate|load|cpu|threads|latency|bandwidth|progress|waiting|uptime|commit|package|peak|free|url|drift|eta|"
    r"^b64_json$|revised|request_id|digest|seed$|^job$|^server$"
)
CLOSE = 1e-4
# Differences from fccc7d9 that are wanted: a case and a line of its report, as regular expressions, and the reason.
WANTED: tuple[tuple[str, str, str], ...] = (
    (
        "plan|plan flux|plan video",
        r"\.(pictures_per_hour|why|terms\S*|words|config\.\w+)( is gone)?(:|$)",
        "predicted seconds count kernels of exchanges and merges, and no copy for the heads of one sample",
    ),
    (
        "plan|plan flux|plan video",
        r"\.(memory|too_large|valid): ",
        "one prediction of memory: plans read the walk of the program, as the check before loading does",
    ),
    (
        "generate.*",
        r"\.json\.(pictures is gone|images is new)$",
        "one name for one thing: an image",
    ),
    (
        "train no folder",
        r"\.exit: ",
        "a folder that cannot be written is the request's mistake, where it was a traceback",
    ),
    (
        "study",
        r"\.(findings\[\d\]|rules\[\d\]\.sqrt): ",
        "a rule of two parameters is fitted to three numbers of devices or more; one image has no standard error",
    ),
    ("http openapi", r"\.(description|summary): ", "words of the API's documentation"),
    ("http openapi", r"JobError\.properties\.code\.enum: ", "failures of the server's disk have a code of their own"),
    ("http model|http models", r"\.inputs: ", "a mask that the transformer cannot use is not offered"),
    ("http .*", r"\.error\.message: ", "other words of an error message"),
)


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


def command(source: Path, words: tuple[str, ...], out: Path, made: Path, stop: bool = False) -> dict[str, Any]:
    """Exit code and JSON of a command line; its error message where it fails; with ``stop`` Ctrl-C is sent to it."""
    run, file = out.with_suffix(".yaml"), out.parent / "file.txt"
    out.parent.mkdir(exist_ok=True)
    file.write_text("a red fox", encoding="utf-8")
    if "{run}" in words:
        run.write_text(RUN.format(made=made), encoding="utf-8")
        described = {"file_name": "0000-a-red-fox-seed0.png", "text": "a red fox"}
        (made / "metadata.jsonl").write_text(json.dumps(described), encoding="utf-8")
    line = [word.format(out=out, made=made, run=run, file=file) for word in words]
    started = subprocess.Popen(
        [sys.executable, "-m", "ditmesh", *line],
        env=environment(source),
        cwd=out.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 600
    while stop and started.poll() is None and time.monotonic() < end and not any(out.glob("**/*.*")):
        time.sleep(0.1)
    if stop:
        started.send_signal(signal.SIGINT)
    shown, said = (
        text.replace(str(out), "OUT").replace(str(made), "MADE").replace(str(out.parent), "FOLDER")
        for text in started.communicate(timeout=600)
    )
    # Text for people is in other words from version to version.
    answer = parsed(shown) if "--json" in line else None
    return {"exit": started.returncode, "json": answer, "error": said.strip() if started.returncode else ""}


def parsed(text: str) -> Any:
    text = re.sub(r"job_[0-9a-f]{32}", "JOB", text)
    try:
        return json.loads(text)
    except ValueError:
        if text.startswith(("id: ", "event: ", ": ")):
            # A stream: the last event of each name; how many come, and when, is the clock's.
            events: dict[str, Any] = {}
            for event in text.split("\n\n"):
                fields = dict(line.partition(": ")[::2] for line in event.splitlines() if not line.startswith(":"))
                if "data" in fields:
                    events[fields.get("event", "")] = parsed(fields["data"])
            return events
        # Metrics: the names and labels; other text without its numbers.
        return {re.sub(r"[\d.e+-]+$", "", line).strip(): None for line in text.splitlines()}


def responses(source: Path, folder: Path, wanted: str) -> dict[str, dict[str, Any]]:
    """Status, names of the headers and body of every request to a server that has loaded its model."""
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
        while asked(url, "GET", "/readyz", None)["status"] != 200:
            time.sleep(0.5)
        for name, (method, path, body) in REQUESTS.items():
            if wanted in f"http {name}" or name == "post job":
                answers[f"http {name}"] = asked(url, method, path.format(job=job), body)
                if name == "post job":
                    job = answers[f"http {name}"].pop("job")
                    while asked(url, "GET", f"/v1/jobs/{job}", None)["json"]["status"] in ("queued", "running"):
                        time.sleep(0.2)
        return answers
    finally:
        started.terminate()
        started.wait(60)


def asked(url: str, method: str, path: str, body: Any) -> dict[str, Any]:
    """Status, names of the headers and content of a response; of an endless stream, its first event."""
    data, kind = None if body is None else json.dumps(body).encode(), "application/json"
    if isinstance(body, tuple):
        data, kind = form(*body)
    request = urllib.request.Request(url + path, data, {"Content-Type": kind} if data else {}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answered(answer, first=path.endswith("/server/events"))
    except urllib.error.HTTPError as error:
        return answered(error)
    except urllib.error.URLError:
        return {"status": 0}


def answered(answer: Any, first: bool = False) -> dict[str, Any]:
    """A response as data; images and pages are not read."""
    kind = answer.headers.get("Content-Type", "")
    data = b"".join(iter(answer.readline, b"\n")) if first else answer.read()
    said = None if kind.startswith(("image/", "text/html")) else data.decode()
    found = {"status": answer.status, "type": kind, "headers": sorted(map(str.lower, answer.headers))}
    made = re.match(r'{"id":"(job_\w+)"', said or "")
    return found | {"json": None if said is None else parsed(said)} | ({"job": made.group(1)} if made else {})


def form(fields: dict[str, Any], file: str | None) -> tuple[bytes, str]:
    """A form's body, with a picture under the name ``file``, and its type."""
    parts = [f'name="{name}"\r\n\r\n{value}'.encode() for name, value in fields.items()]
    if file is not None:
        picture = io.BytesIO()
        Image.new("RGB", (64, 64), "orange").save(picture, "PNG")
        head = f'name="{file}"; filename="a.png"\r\nContent-Type: image/png\r\n\r\n'
        parts.append(head.encode() + picture.getvalue())
    whole = b"".join(b"--LIMIT\r\nContent-Disposition: form-data; " + part + b"\r\n" for part in parts)
    return whole + b"--LIMIT--\r\n", "multipart/form-data; boundary=LIMIT"


def wanted_because(name: str, line: str) -> str:
    """The reason for which a difference is wanted; empty: it is not listed."""
    for case, difference, reason in WANTED:
        if re.fullmatch(case, name) and re.search(difference, line):
            return reason
    return ""


def main() -> int:
    older, wanted = Path(sys.argv[1]).resolve(), " ".join(sys.argv[2:])
    if not (older / "ditmesh" / "__init__.py").is_file():
        raise SystemExit(f"{older} holds no ditmesh; give the src folder of another version")
    found, compared = 0, 0
    reasons = Counter[str]()

    def compare(name: str, old: dict[str, Any], new: dict[str, Any]) -> None:
        nonlocal found, compared
        messages = [one.pop("error", "") for one in (old, new)]
        every = sorted(line for line in differences(old, new) if not line.endswith(" is new"))
        reasons.update(reason for line in every if (reason := wanted_because(name, line)))
        open_ones = [line for line in every if not wanted_because(name, line)]
        found, compared = found + len(open_ones), compared + 1
        words = [f"{len(open_ones)} differ"] * bool(open_ones)
        words += [f"{len(every) - len(open_ones)} wanted"] * (len(every) > len(open_ones))
        print(f"{name}: {', '.join(words) or 'the same'}", flush=True)
        for line in open_ones:
            print(f"    {line}", flush=True)
        if messages[0] != messages[1]:
            print(f"    was: {messages[0][-400:]!r}\n    is: {messages[1][-400:]!r}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        sources = (older, ROOT / "src")
        chosen = {name: words for name, words in COMMANDS.items() if wanted == "commands" or wanted in name}
        if any("{made}" in word or "{run}" in word for words in chosen.values() for word in words):
            chosen = {"generate": COMMANDS["generate"]} | chosen
        for name, words in chosen.items():
            places = [Path(folder, str(number)) for number in range(2)]
            answers = [
                command(source, words, place / name.replace(" ", "-"), place / "generate", "stopped" in name)
                for source, place in zip(sources, places, strict=True)
            ]
            compare(name, *answers)
        if not wanted or wanted.startswith("http"):
            old, new = (
                responses(source, Path(folder, str(number), "served"), wanted) for number, source in enumerate(sources)
            )
            for name in old:
                compare(name, old[name], new[name])
    for reason, times in reasons.most_common():
        print(f"{times} differences are wanted: {reason}")
    print(f"{compared} answers compared, {found} differences")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())
