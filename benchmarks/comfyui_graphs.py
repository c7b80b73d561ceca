"""Generated graphs of a real ComfyUI: the node Parallelize model against the same graph without it.

    DITMESH_COMFYUI=~/ComfyUI python benchmarks/comfyui_graphs.py --graphs 200 --seed 0

Tiny models with random weights of every family, in files that ComfyUI's own loaders read, whole or as on a card with
too little memory, in float32, bfloat16 and 8 bits; stacks of LoRA files that change from graph to graph, samplers, odd
sizes, batches, guidance on and off, masks, reference latents, ControlNet residuals and patches of other nodes.
ComfyUI's own nodes load and sample all of it, on the CPU. A graph may give what one device gives, or be refused in a
sentence. Anything else is counted as wrong, and the exit status says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from comfyui_files import LOADERS, WEIGHTS, Files, partly_loaded

ROOT = Path(__file__).parents[1]
# Largest error allowed, of the largest value of the latents.
ALLOWED = 1e-5
# What steps are shaken by, of their largest value, to see how much a sampler enlarges: bits that float32 rounds.
SHAKEN = 3e-7

SAMPLERS = ["euler", "euler_ancestral", "heun", "dpmpp_2m", "ddim", "lcm", "res_multistep", "dpm_2"]
SCHEDULERS = ["simple", "normal", "beta", "sgm_uniform"]
CONFIGS = ["ulysses=2", "ring=2", "cfg=2", "ulysses=2 reproducible", "data=2"]


def prepare(arguments: list[str]) -> Any:
    """Import ComfyUI from DITMESH_COMFYUI with these options, and the nodes; the package of the nodes."""
    folder = os.environ["DITMESH_COMFYUI"]
    # Before stand-ins of packages that ComfyUI wants and nothing here uses.
    import transformers.modeling_utils  # noqa: F401

    import ditmesh  # noqa: F401

    sys.argv = [str(Path(folder) / "main.py"), "--cpu", *arguments]
    sys.path.insert(0, folder)
    sys.path += os.environ.get("DITMESH_COMFYUI_STUBS", "").split(os.pathsep)
    import comfy.options

    comfy.options.enable_args_parsing()
    import nodes  # noqa: F401

    spec = importlib.util.spec_from_file_location(
        "ditmesh_nodes",
        ROOT / "integrations" / "comfyui" / "__init__.py",
        submodule_search_locations=[str(ROOT / "integrations" / "comfyui")],
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = package
    spec.loader.exec_module(package)
    return package


def numbers(*shape: int, seed: int) -> Any:
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# The width of the text's embedding, everywhere.
TEXT = 24
FLUX = {
    "in_channels": 16, "out_channels": 16, "vec_in_dim": 16, "context_in_dim": TEXT, "hidden_size": 32,
    "mlp_ratio": 2.0, "num_heads": 4, "depth": 2, "depth_single_blocks": 2, "axes_dim": [2, 2, 4], "theta": 10000,
    "patch_size": 2, "qkv_bias": True, "guidance_embed": True,
}  # fmt: skip
WAN = {
    "patch_size": (1, 2, 2), "text_len": 16, "in_dim": 16, "dim": 48, "ffn_dim": 64, "freq_dim": 32, "text_dim": TEXT,
    "out_dim": 16, "num_heads": 4, "num_layers": 2, "window_size": (-1, -1), "qk_norm": True, "cross_attn_norm": True,
    "eps": 1e-6,
}  # fmt: skip
SD3 = {
    "in_channels": 16, "pos_embed_scaling_factor": None, "input_size": None, "pos_embed_offset": None,
    "pos_embed_max_size": 16, "patch_size": 2, "depth": 2, "adm_in_channels": 16, "qk_norm": "rms",
    "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": TEXT, "out_features": 128}},
}  # fmt: skip
# By family: the class of comfy.supported_models, its settings, dimensions of the latents between channels and rows.
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "flux": ("Flux", {"image_model": "flux", **FLUX}, ()),
    "sd3": ("SD3", SD3, ()),
    "aura": (
        "AuraFlow",
        {
            "in_channels": 4, "out_channels": 4, "patch_size": 2, "dim": 64, "n_layers": 4,
            "n_double_layers": 2, "n_heads": 4, "global_conddim": 64, "cond_seq_dim": 2048, "max_seq": 256,
        },
        (),
    ),
    "lumina2": (
        "Lumina2",
        {
            "image_model": "lumina2", "patch_size": 2, "in_channels": 16, "dim": 48, "n_layers": 2,
            "n_refiner_layers": 1, "n_heads": 4, "n_kv_heads": 2, "qk_norm": True, "cap_feat_dim": TEXT,
            "axes_dims": (4, 4, 4), "axes_lens": (32, 32, 32),
        },
        (),
    ),
    "qwen": (
        "QwenImage",
        {
            "image_model": "qwen_image", "patch_size": 2, "in_channels": 64, "out_channels": 16, "num_layers": 2,
            "attention_head_dim": 16, "num_attention_heads": 4, "joint_attention_dim": TEXT,
            "pooled_projection_dim": 16, "guidance_embeds": False, "axes_dims_rope": (4, 6, 6),
        },
        (1,),
    ),
    "chroma": (
        "Chroma",
        {
            "image_model": "chroma", "in_channels": 64, "out_channels": 64, "context_in_dim": TEXT, "hidden_size": 32,
            "mlp_ratio": 2.0, "num_heads": 4, "depth": 2, "depth_single_blocks": 2, "axes_dim": [2, 2, 4],
            "theta": 10000, "patch_size": 2, "qkv_bias": True, "in_dim": 64, "out_dim": 32, "hidden_dim": 32,
            "n_layers": 2,
        },
        (),
    ),
    "hunyuan_video": (
        "HunyuanVideo",
        {
            "image_model": "hunyuan_video", **FLUX, "theta": 256, "patch_size": [1, 2, 2], "byt5": False,
            "meanflow": False,
        },
        (3,),
    ),
    "wan": ("WAN21_T2V", {"image_model": "wan2.1", "model_type": "t2v", **WAN}, (3,)),
    "wan_i2v": ("WAN21_I2V", {"image_model": "wan2.1", "model_type": "i2v", **WAN, "in_dim": 36}, (3,)),
    "vace": (
        "WAN21_Vace",
        {
            "image_model": "wan2.1", "model_type": "vace", **WAN, "vace_layers": 1, "vace_in_dim": 96,
        },
        (3,),
    ),
    "ltxv": (
        "LTXV",
        {
            "image_model": "ltxv", "in_channels": 128, "cross_attention_dim": 32, "attention_head_dim": 8,
            "num_attention_heads": 4, "caption_channels": TEXT, "num_layers": 2,
        },
        (3,),
    ),
    "cosmos": (
        "CosmosT2IPredict2",
        {
            "image_model": "cosmos_predict2", "max_img_h": 64, "max_img_w": 64, "max_frames": 8, "in_channels": 16,
            "out_channels": 16, "patch_spatial": 2, "patch_temporal": 1, "model_channels": 48,
            "concat_padding_mask": True, "crossattn_emb_channels": TEXT, "num_blocks": 2, "num_heads": 4,
            "mlp_ratio": 2.0, "pos_emb_cls": "rope3d", "pos_emb_learnable": True, "extra_per_block_abs_pos_emb": False,
            "use_adaln_lora": True, "adaln_lora_dim": 256,
        },
        (1,),
    ),
}  # fmt: skip


def built(family: str, seed: int = 0) -> Any:
    """ComfyUI's own ModelPatcher around its own model of a family, with random weights."""
    import comfy.model_patcher
    import comfy.supported_models
    import torch

    name, settings, _ = FAMILIES[family]
    config = getattr(comfy.supported_models, name)(dict(settings))
    config.set_inference_dtype(torch.float32, None)
    model = config.get_model({}, "", device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.diffusion_model.parameters():
            scale = 0.1 if parameter.dim() > 1 else 0.3
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    model.eval().requires_grad_(False)
    return comfy.model_patcher.ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))


def lora_of(patcher: Any, seed: int) -> dict[str, Any]:
    """The contents of a LoRA file for some of a model's matrices."""
    chooser, low = random.Random(seed), {}
    weights = {n: p for n, p in patcher.model.named_parameters() if p.dim() == 2 and n.endswith(".weight")}
    names = sorted(name for name in weights if "block" in name or "layers" in name)
    for number, name in enumerate(chooser.sample(names, min(3, len(names)))):
        weight = weights[name]
        stem = name.removesuffix(".weight")
        low[f"{stem}.lora_up.weight"] = numbers(weight.shape[0], 2, seed=seed * 10 + number) * 0.2
        low[f"{stem}.lora_down.weight"] = numbers(2, weight.shape[1], seed=seed * 10 + number + 5) * 0.2
    return low


class Residuals:
    """A ControlNet of another node: it adds residuals of the right shape to some blocks."""

    def __init__(self, tokens: int, width: int, seed: int) -> None:
        self.previous_controlnet = self.extra_hooks = None
        self._shape, self._seed = (tokens, width), seed

    def get_control(self, x: Any, *_: Any) -> dict[str, Any]:
        some = [numbers(x.shape[0], *self._shape, seed=self._seed + n) * 0.3 for n in range(2)]
        return {"input": some, "output": [-one for one in some]}

    def pre_run(self, *_: Any) -> None: ...

    def cleanup(self) -> None: ...

    def get_models(self) -> list[Any]:
        return []

    def inference_memory_requirements(self, dtype: Any) -> int:
        return 0

    def get_extra_hooks(self) -> list[Any]:
        return []

    def copy(self) -> Any:
        return self


def same_block(args: Any, extra: Any) -> Any:
    """A patch that stands in for a block and changes nothing."""
    return extra["original_block"](args)


def softer_block(args: Any, extra: Any) -> Any:
    """One that changes what a block gives, token by token."""
    out = extra["original_block"](args)
    return {**out, "img": out["img"] * 0.9}


def mixing_block(args: Any, extra: Any) -> Any:
    """One that mixes tokens where no one can see it."""
    out = extra["original_block"](args)
    return {**out, "img": out["img"] + 0.5 * out["img"].roll(1, dims=1)}


PATCHES = {"same": same_block, "softer": softer_block, "mixing": mixing_block}


def latent_of(patcher: Any, graph: dict[str, Any]) -> Any:
    """An empty LATENT's samples, of a graph's size."""
    import torch

    _, _, between = FAMILIES[graph["family"]]
    return torch.zeros(graph["batch"], patcher.model.latent_format.latent_channels, *between, *graph["size"])


def condition(patcher: Any, graph: dict[str, Any], number: int) -> list[Any]:
    """A CONDITIONING of a graph: 0 is the positive one."""
    import torch

    family, seed = graph["family"], graph["seed"]
    _, settings, between = FAMILIES[family]
    rows, columns = graph["size"]
    channels = patcher.model.latent_format.latent_channels
    text = numbers(1, graph["text"], settings.get("cond_seq_dim", TEXT), seed=seed + number)
    more: dict[str, Any] = {"pooled_output": numbers(1, 16, seed=seed + number + 1), "guidance": 3.5}
    if graph.get("references"):
        more["reference_latents"] = [numbers(1, channels, *between, 6, 4 + 2 * n, seed=90 + n) for n in range(2)]
    if graph.get("control") and number == 0:
        tokens = -(-rows // 2) * -(-columns // 2)
        more["control"] = Residuals(tokens, 32, seed)
        more["control_apply_to_uncond"] = True
    if family == "wan_i2v":
        more["concat_latent_image"] = numbers(1, 16, *between, rows, columns, seed=41)
        more["concat_mask"] = torch.ones(1, 1, *between, rows, columns)
    if family == "vace":
        more["vace_frames"] = [numbers(1, 32, *between, rows, columns, seed=43)]
        more["vace_mask"] = [torch.ones(1, 64, *between, rows, columns)]
        more["vace_strength"] = [1.0]
    if family in ("ltxv", "lumina2"):
        more |= {"frame_rate": 25, "attention_mask": torch.ones(1, graph["text"]).long()}
    return [[text, more]]


def sampled(patcher: Any, graph: dict[str, Any]) -> Any:
    """What ComfyUI's own sampling makes of a graph: the latents."""
    import comfy_extras.nodes_custom_sampler as custom
    import nodes
    import torch

    seed = graph["seed"]
    rows, columns = graph["size"]
    if shaken := graph.get("shaken"):
        generator = torch.Generator().manual_seed(seed)

        def shake(model: Any, given: dict[str, Any]) -> Any:
            out = model(given["input"], given["timestep"], **given["c"])
            return out + shaken * out.abs().max() * torch.randn(out.shape, generator=generator)

        patcher = patcher.clone()
        patcher.set_model_unet_function_wrapper(shake)
    given: dict[str, Any] = {"samples": latent_of(patcher, graph)}
    if graph.get("mask"):
        given["noise_mask"] = torch.ones(1, 1, rows, columns)
        given["noise_mask"][..., : columns // 2] = 0
    sampler, scheduler = graph["sampler"], graph["scheduler"]
    positive, negative = condition(patcher, graph, 0), condition(patcher, graph, 50)
    denoise = graph.get("denoise", 1.0)
    with torch.inference_mode(), partly_loaded(graph.get("part")):
        if graph.get("node", "KSampler") == "KSampler":
            said = patcher, seed, graph["steps"], graph["cfg"], sampler, scheduler, positive, negative, given, denoise
            return nodes.KSampler().sample(*said)[0]["samples"]
        (noise,) = custom.RandomNoise().get_noise(seed)
        (guider,) = custom.CFGGuider().get_guider(patcher, positive, negative, graph["cfg"])
        (method,) = custom.KSamplerSelect().get_sampler(sampler)
        (sigmas,) = custom.BasicScheduler().get_sigmas(patcher, scheduler, graph["steps"], denoise)
        return custom.SamplerCustomAdvanced().sample(noise, guider, method, sigmas, given)[0]["samples"]


EACH = {
    "seed": 3, "size": (10, 8), "batch": 1, "text": 7, "steps": 3, "cfg": 4.0, "sampler": "euler",
    "scheduler": "simple", "loras": [(1, 1.0)], "mask": False,
}  # fmt: skip


def generated(chooser: random.Random, families: list[str]) -> dict[str, Any]:
    """A graph."""
    family = chooser.choice(families)
    still = not FAMILIES[family][2]
    graph: dict[str, Any] = {
        "family": family,
        "config": chooser.choice(CONFIGS[:3] + CONFIGS),
        "seed": chooser.randrange(1000),
        "size": (chooser.choice([8, 10, 12, 7 if still else 6]), chooser.choice([8, 10, 6, 9 if still else 14])),
        "batch": chooser.choice([1, 1, 2, 3]),
        "text": chooser.choice([6, 7, 12]),
        "steps": chooser.choice([2, 3]),
        "cfg": chooser.choice([1.0, 4.0]),
        "sampler": chooser.choice(SAMPLERS),
        "scheduler": chooser.choice(SCHEDULERS),
        "loras": [(chooser.randrange(50), chooser.choice([0.5, 1.0, -0.7])) for _ in range(chooser.choice([0, 1, 2]))],
        "mask": chooser.random() < 0.2,
        "loader": chooser.choice(LOADERS),
        "weights": chooser.choice(["default"] * 5 + [*WEIGHTS]),
        "part": chooser.choice([None] * 5 + [0.6, 0.2, 0.0]),
        "node": chooser.choice(["KSampler", "SamplerCustomAdvanced"]),
    }
    if graph["loader"] != "UNETLoader" and not graph["weights"].endswith("file"):
        # The other loader has no such widget.
        graph["weights"] = "default"
    if family == "flux":
        graph["references"] = chooser.random() < 0.3
        graph["control"] = chooser.random() < 0.3 and not graph["references"]
        if chooser.random() < 0.4:
            graph["patch"] = chooser.choice([*PATCHES])
    return graph


def loaded(files: Files, models: dict[Any, Any], graph: dict[str, Any]) -> Any:
    """The MODEL of a graph, from files: loaded once, as ComfyUI keeps what a node has returned."""
    import torch

    key = graph["family"], graph.get("loader", LOADERS[0]), graph.get("weights", "default")
    with torch.inference_mode():
        if key not in models:
            models[key] = files.model(*key)
        plain = models[key]
        for seed, strength in graph["loras"]:
            plain = files.lora(plain, seed, strength, lora_of)
    if graph["loras"] and not plain.patches:
        raise AssertionError("no LoRA fits the model")
    if name := graph.get("patch"):
        plain = plain.clone()
        plain.set_model_patch_replace(PATCHES[name], "dit", "double_block", 1)
    return plain


def run(package: Any, files: Files, models: dict[Any, Any], graph: dict[str, Any]) -> tuple[str, Any]:
    """What came of a graph: ``"right"``, ``"refused"`` or ``"wrong"``, and the error or a sentence."""
    from ditmesh import DitmeshError

    plain = loaded(files, models, graph)
    expected = sampled(plain, graph)
    try:
        out = sampled(parallel(package, plain, graph["config"]), graph)
    except DitmeshError as error:
        return "refused", str(error).splitlines()[0]
    return compared(plain, graph, expected, out)


def parallel(package: Any, plain: Any, config: str) -> Any:
    """What the node Parallelize model makes of a MODEL."""
    node = package.NODE_CLASS_MAPPINGS["DitmeshParallelizeModel"]()
    (made,) = node.parallelize(plain, ulysses=1, ring=1, cfg=1, settings=config)
    return made


def compared(plain: Any, graph: dict[str, Any], expected: Any, out: Any) -> tuple[str, Any]:
    """``"right"`` or ``"wrong"``, and the error of latents from those of one device; of a MODEL without the node."""
    again = sampled(plain, graph)
    error = float((out - expected).abs().max() / expected.abs().max())
    after = float((again - expected).abs().max())
    if after:
        return "wrong", f"without the node afterwards: off by {after}"
    if error > ALLOWED:
        # Some samplers divide by a small sigma: how much they enlarge the last bits of a step, one device tells.
        shaken = sampled(plain, {**graph, "shaken": SHAKEN})
        enlarged = float((shaken - expected).abs().max() / expected.abs().max())
        if error <= enlarged:
            return "right", f"{error}; one device, each of whose steps is off by {SHAKEN}: {enlarged}"
    return ("right" if error <= ALLOWED else "wrong"), error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--families", default=",".join(FAMILIES), help="names, with commas between them")
    parser.add_argument("--attention", default="--use-pytorch-cross-attention", help="ComfyUI's option")
    parser.add_argument("--one", help="a single graph, as JSON")
    parser.add_argument("--each", action="store_true", help="every family with ulysses=2 and ring=2, instead")
    options = parser.parse_args()
    package = prepare([options.attention] if options.attention else [])
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chooser, models, counts = random.Random(options.seed), {}, {"right": 0, "refused": 0, "wrong": 0}
    import comfy.utils

    comfy.utils.set_progress_bar_enabled(False)
    with tempfile.TemporaryDirectory() as folder:
        files = Files(Path(folder), built, lambda family: FAMILIES[family][1])
        try:
            families = options.families.split(",")
            for number in range(2 * len(families) if options.each else options.graphs):
                if options.each:
                    graph = {**EACH, "family": families[number // 2], "config": ("ulysses=2", "ring=2")[number % 2]}
                else:
                    graph = json.loads(options.one) if options.one else generated(chooser, families)
                started = time.monotonic()
                try:
                    outcome, what = run(package, files, models, graph)
                except Exception as error:
                    outcome, what = "wrong", f"{type(error).__name__}: {error}"
                    traceback.print_exc()
                counts[outcome] += 1
                seconds = round(time.monotonic() - started, 1)
                print(json.dumps({"n": number, **graph, "outcome": outcome, "what": what, "s": seconds}), flush=True)
        finally:
            package.parallel.close_followers()
    print(json.dumps(counts))
    sys.exit(counts["wrong"] > 0)


if __name__ == "__main__":
    main()
