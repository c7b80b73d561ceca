"""examples/hosts: the files for Slurm and Kubernetes start what they say, with options and fields that there are."""

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


def command_of(text: str) -> list[str]:
    """The words of a shell command behind ``ditmesh generate``, without variables."""
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    at = words.index("generate")
    assert words[at - 1] == "ditmesh"
    return words[at + 1 :]


def check_options(words: list[str]) -> dict[str, str]:
    """Options of a command, which `ditmesh generate` has."""
    commands: Any = typer.main.get_command(app)
    known = {name for one in commands.commands["generate"].params for name in one.opts}
    options = {name: value for name, value in pairwise(words) if name.startswith("--")}
    assert set(options) <= known
    return options


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
