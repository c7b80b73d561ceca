"""ComfyUI's own nodes that take and return a MODEL, with the node Parallelize model and without it.

    DITMESH_COMFYUI=~/ComfyUI python benchmarks/comfyui_nodes.py
    DITMESH_COMFYUI=~/ComfyUI python benchmarks/comfyui_nodes.py --random 100 --seed 0

Each node that ComfyUI brings is put on a tiny SD3 and a tiny Flux with random weights, and the latents that two ranks
sample are compared with those of one device; ``--random`` takes up to three nodes, before and behind Parallelize model,
and the sizes, samplers and settings of `comfyui_graphs.py`. A graph may give what one device gives, or be refused in a
sentence. A node that changes nothing of what is sampled is marked, and one that needs what no tiny model has is named
with it. Anything else is counted as wrong, and the exit status says so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import comfyui_graphs as graphs
from comfyui_files import Files

# Layers to be skipped, by the names of widgets that name them: all of the tiny models, in turn.
LAYERS = ("layers", "double_layers", "single_layers", "double_blocks", "single_blocks", "blocks", "unet_block_list")
# Types of widgets.
WIDGETS = ("INT", "FLOAT", "BOOLEAN", "STRING")
EACH = {**graphs.EACH, "steps": 4, "loras": []}
# What a stock node is as it comes, and what is asked of a layer.
CASES: tuple[str, ...] = ("", "first", "middle", "last", "all but the first", "all")


class NotMade(Exception):
    """A node that nothing here can be given to."""


def stock_nodes() -> dict[str, Any]:
    """ComfyUI's own nodes that take and return a MODEL, by name."""
    import nodes

    asyncio.run(nodes.init_builtin_extra_nodes())
    found = {}
    for name, kind in sorted(nodes.NODE_CLASS_MAPPINGS.items()):
        takes = kind.INPUT_TYPES().get("required", {}).values()
        if "MODEL" in kind.RETURN_TYPES and any(one[0] == "MODEL" for one in takes):
            found[name] = kind
    return found


def layers_of(inner: Any) -> int:
    """Blocks of the longest list of a diffusion model."""
    import torch

    return max(len(one) for one in inner.children() if isinstance(one, torch.nn.ModuleList))


def layers(case: str, count: int) -> list[int]:
    """Numbers of layers that a case skips."""
    every = list(range(count))
    some = {"first": every[:1], "middle": every[1:2], "last": every[-1:], "all but the first": every[1:], "all": every}
    return some[case]


def argument(name: str, kind: Any, options: dict[str, Any], patcher: Any, graph: dict[str, Any], case: str) -> Any:
    """What a node is given for an input: what it proposes, in effect from the first step to the last."""
    if kind == "MODEL":
        return patcher
    if kind == "CONDITIONING":
        return graphs.condition(patcher, graph, 70)
    if kind == "LATENT":
        return {"samples": graphs.latent_of(patcher, graph)}
    if kind == "CLIP":
        # Loaders of LoRA files take a model without one.
        return None
    if kind == "LATENT_OPERATION":
        return lambda latent, **_: 0.8 * latent
    if kind == "LORA_MODEL":
        import comfy.utils
        import folder_paths

        return comfy.utils.load_torch_file(
            folder_paths.get_full_path("loras", folder_paths.get_filename_list("loras")[0])
        )
    if isinstance(kind, list) or kind == "COMBO":
        choices = kind if isinstance(kind, list) else options.get("options") or []
        if not choices:
            raise NotMade(f"a file for {name}")
        if name.endswith("dtype") and "fp32" in choices:
            # The limits are float32's.
            return "fp32"
        return options.get("default", choices[0])
    if kind not in WIDGETS:
        raise NotMade(kind)
    if name.startswith("start"):
        return options.get("min", 0.0)
    if name.startswith("end") or name == "reuse_threshold":
        return options.get("max", 1.0)
    if name in LAYERS and kind == "STRING" and case:
        return ", ".join(map(str, layers(case, layers_of(patcher.model.diffusion_model))))
    return options.get("default", {"INT": 0, "FLOAT": 0.0, "BOOLEAN": False, "STRING": ""}[kind])


def takes_layers(kind: Any) -> bool:
    inputs = kind.INPUT_TYPES()
    return any(n in LAYERS and one[0] == "STRING" for group in inputs.values() for n, one in group.items())


def applied(kind: Any, patcher: Any, graph: dict[str, Any], case: str = "") -> Any:
    """The MODEL that a node returns."""
    import torch

    inputs = kind.INPUT_TYPES()
    given = {
        name: argument(name, one[0], one[1] if len(one) > 1 else {}, patcher, graph, case)
        for name, one in inputs.get("required", {}).items()
    }
    for name, one in inputs.get("optional", {}).items():
        if one[0] in WIDGETS:
            given[name] = argument(name, one[0], one[1] if len(one) > 1 else {}, patcher, graph, case)
    place = list(kind.RETURN_TYPES).index("MODEL")
    # Nodes that train draw from torch's own generator.
    torch.manual_seed(0)
    with torch.inference_mode():
        made = getattr(kind() if not hasattr(kind, "GET_SCHEMA") else kind, kind.FUNCTION)(**given)
    made = getattr(made, "result", made)
    return made[place]


def run(package: Any, plain: Any, before: Any, behind: Any, graph: dict[str, Any]) -> tuple[str, Any]:
    """What came of nodes: ``"right"``, ``"no effect"``, ``"refused"``, ``"not made"``, ``"fails"`` or ``"wrong"``.

    Args:
        package: of the nodes of this project.
        plain: a MODEL.
        before, behind: what stands before and behind Parallelize model: a function of a MODEL.
    """
    import torch

    from ditmesh import DitmeshError

    try:
        alone = behind(before(plain))
    except NotMade as error:
        return "not made", f"needs {error}"
    except Exception as error:
        return "fails", f"without ranks too: {type(error).__name__}: {error}".splitlines()[0]
    bare = graphs.sampled(plain, graph)
    try:
        expected = graphs.sampled(alone, graph)
    except Exception as error:
        return "fails", f"without ranks too: {type(error).__name__}: {error}".splitlines()[0]
    try:
        out = graphs.sampled(behind(graphs.parallel(package, before(plain), graph["config"])), graph)
    except DitmeshError as error:
        return "refused", str(error).splitlines()[0]
    if not expected.isfinite().all():
        return ("right", "not finite, alike") if torch.equal(out.isfinite(), expected.isfinite()) else ("wrong", "")
    outcome, error = graphs.compared(alone, graph, expected, out)
    if outcome == "right" and torch.equal(bare, expected):
        return "no effect", error
    return outcome, error


def each(stock: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Every node on every family, and with layers in every place: name, case, family."""
    return [
        (name, case, family)
        for name, kind in stock.items()
        for family in ("sd3 of four", "flux")
        for case in (CASES[1:] if takes_layers(kind) else CASES[:1])
    ]


def drawn(chooser: random.Random, stock: dict[str, Any], good: list[str]) -> tuple[dict[str, Any], list[tuple]]:
    """A random graph, and its nodes: name, case, and whether it stands behind Parallelize model."""
    graph = graphs.generated(chooser, ["sd3 of four", "flux"])
    graph |= {"loras": [], "loader": "", "weights": "default", "part": None, "patch": None}
    chosen = chooser.sample(good, chooser.choice([1, 1, 2, 3]))
    placed = [(n, chooser.choice(CASES[1:]) if takes_layers(stock[n]) else "", chooser.random() < 0.3) for n in chosen]
    return graph, placed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--random", type=int, default=0, metavar="N", help="so many random graphs, instead of each node"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="names of nodes, with commas between them")
    parser.add_argument("--config", default="ulysses=2", help="settings of Parallelize model, without --random")
    options = parser.parse_args()
    package = graphs.prepare(["--use-pytorch-cross-attention"])
    import comfy.utils
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    comfy.utils.set_progress_bar_enabled(False)
    name, settings, between = graphs.FAMILIES["sd3"]
    embedder = {**settings["context_embedder_config"], "params": {"in_features": graphs.TEXT, "out_features": 256}}
    graphs.FAMILIES["sd3 of four"] = name, {**settings, "depth": 4, "context_embedder_config": embedder}, between
    stock = stock_nodes()
    if options.only:
        stock = {name: stock[name] for name in options.only.split(",")}
    counts: Counter[str] = Counter()
    chooser, models = random.Random(options.seed), {f: graphs.built(f) for f in ("sd3 of four", "flux")}

    def through(placed: list[tuple], graph: dict[str, Any]) -> Any:
        def apply(patcher: Any) -> Any:
            for name, case in placed:
                patcher = applied(stock[name], patcher, graph, case)
            return patcher

        return apply

    def told(graph: dict[str, Any], placed: list[tuple], words: str) -> None:
        before = through([one[:2] for one in placed if not one[2]], graph)
        behind = through([one[:2] for one in placed if one[2]], graph)
        try:
            outcome, what = run(package, models[graph["family"]], before, behind, graph)
        except Exception as error:
            outcome, what = "wrong", f"{type(error).__name__}: {error}"
            traceback.print_exc()
        counts[outcome] += 1
        print(f"{outcome:9} | {words} | {what}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        files = Files(Path(folder), graphs.built, lambda family: graphs.FAMILIES[family][1])
        files.lora(models["flux"], 1, 1.0, graphs.lora_of)
        try:
            if not options.random:
                for name, case, family in each(stock):
                    graph = {**EACH, "family": family, "config": options.config}
                    told(graph, [(name, case, False)], f"{name} | {case} | {family}")
            for number in range(options.random):
                graph, placed = drawn(chooser, stock, list(stock))
                told(graph, placed, f"{number} | {placed} | {json.dumps(graph)}")
        finally:
            package.parallel.close_followers()
    print(json.dumps(counts))
    sys.exit(counts["wrong"] > 0)


if __name__ == "__main__":
    main()
