"""Commands of pages and of examples/hosts: they start what they say, with options and fields that there are."""

from __future__ import annotations

import re
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer
import yaml

from ditmesh.cli.main import app

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "hosts"
COMMANDS: Any = typer.main.get_command(app)


def command_of(text: str) -> list[str]:
    """The words of a shell command behind ``ditmesh generate``; its variables are 2."""
    words = shlex.split(re.sub(r"\$\w+", "2", text.replace("\\\n", " ")), comments=True)
    at = words.index("generate")
    assert words[at - 1] == "ditmesh"
    return words[at + 1 :]


def check_options(words: list[str], name: str = "generate") -> dict[str, str]:
    """Options of a command, which understands them and their values; in a sentence it may be cut short."""
    try:
        COMMANDS.commands[name].make_context(name, list(words))
    except Exception as error:
        if not re.search("^Missing parameter|requires an argument", str(error)):
            raise
    return {name: value for name, value in pairwise(words) if name.startswith("--")}


def test_every_command_of_the_manual_is_understood():
    """Lines that no test runs, because they name published models, and those in sentences."""
    for page in (*ROOT.glob("README*.md"), *(ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        for line, short in re.findall(r"^(?:\$ )?ditmesh (.+)$|`ditmesh ([^`\n]+)`", text, re.MULTILINE):
            name, _, words = (line or short).partition(" ")
            if name in COMMANDS.commands:
                check_options(shlex.split(words, comments=True), name)


def test_slurm_example():
    path = EXAMPLES / "slurm.sbatch"
    assert subprocess.run(["bash", "-n", path], capture_output=True, text=True, check=False).stderr == ""
    text = path.read_text(encoding="utf-8")
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", text, re.MULTILINE))
    assert {asked[name] for name in ("nodes", "gpus-per-node")} == {"2", "4"}
    # An agent a host, which starts a rank for every GPU.
    assert asked["ntasks-per-node"] == "1"
    line = re.search(r"exec (.*?)\n'", text, re.DOTALL)
    assert line
    check_options(command_of(line[1]))


def test_jobset_example():
    data = yaml.safe_load((EXAMPLES / "jobset.yaml").read_text(encoding="utf-8"))
    assert (data["apiVersion"], data["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    spec = data["spec"]
    (job,) = spec["replicatedJobs"]
    pods = job["template"]["spec"]
    assert pods["completionMode"] == "Indexed"
    pod = pods["template"]["spec"]
    container = pod["containers"][0]
    assert {mount["name"] for mount in container["volumeMounts"]} <= {volume["name"] for volume in pod["volumes"]}
    (line,) = container["args"]
    options = check_options(command_of(line))
    # Pod 0 of job 0, by the name that JobSet gives it.
    first = f"{data['metadata']['name']}-{job['name']}-0-0.{spec['network']['subdomain']}"
    port = container["ports"][0]["containerPort"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert f"--master-addr {first} --master-port {port}" in line
    assert f"--nnodes {pods['completions']} --nproc-per-node {gpus} " in line
    assert pods["completions"] == pods["parallelism"]
    assert int(options["--cfg"]) * int(options["--ulysses"]) == pods["completions"] * gpus
