"""A stand-in for what ComfyUI does with a MODEL, from its documentation: clones, wrappers, attention, a sampler.

Written for these tests. It has what the node Parallelize model relies on: clones that share one model, wrappers around
`apply_model`, callbacks before a run, patches of weights that are put on when a clone is sampled with, patches that
stand in for blocks, and an attention function that a call can replace.
"""

from __future__ import annotations

import copy
import sys
import types
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, TEXT = 16, 2, 6

APPLY_MODEL, DIFFUSION_MODEL, ON_PRE_RUN = "apply_model", "diffusion_model", "on_pre_run"

# What the ranks import: the options of a command line.
OPTIONS = "def enable_args_parsing(enable=True):\n    global parsed\n    parsed = enable\n"


def attention_split(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    transformer_options: Any = None,
    **more: Any,
) -> Tensor:
    """Attention by hand, as an application brings its own; a call's options may put something in its place."""
    override = (transformer_options or {}).get("optimized_attention_override")
    if override is not None and not more.get("skip_reshape"):
        return override(attention_split, q, k, v, heads, mask=mask)
    if not more.get("skip_reshape"):
        q, k, v = (one.unflatten(-1, (heads, -1)).transpose(1, 2) for one in (q, k, v))
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    out = scores.softmax(-1) @ v
    return out if more.get("skip_output_reshape") else out.transpose(1, 2).flatten(2)


class JointBlock(nn.Module):
    """Writes into its arguments, as many of those who publish models do."""

    def __init__(self) -> None:
        super().__init__()
        self.img, self.txt = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out_img, self.out_txt = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, img: Tensor, txt: Tensor, vec: Tensor, transformer_options: Any) -> tuple[Tensor, Tensor]:
        """img (B, S, C), txt (B, T, C), vec (B, 1, C)."""
        parts = [layer(F.layer_norm(x, (WIDTH,)) + vec) for layer, x in ((self.txt, txt), (self.img, img))]
        q, k, v = torch.cat(parts, dim=1).chunk(3, dim=-1)
        out = attention_split(q, k, v, HEADS, transformer_options=transformer_options)
        txt = txt + self.out_txt(out[:, : txt.shape[1]])
        img += self.out_img(out[:, txt.shape[1] :])
        return img, txt


class Denoiser(nn.Module):
    """(B, 4, H, W) latents and (B, T, 6) text to (B, 4, H, W)."""

    def __init__(self) -> None:
        super().__init__()
        self.img_in, self.txt_in, self.time = nn.Linear(4, WIDTH), nn.Linear(TEXT, WIDTH), nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList([JointBlock() for _ in range(3)])
        self.out = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, timestep: Tensor, context: Tensor, control: Any = None, **more: Any) -> Tensor:
        """The prediction, around which a call's options may have put functions."""
        options = more.get("transformer_options") or {}
        around = [one for some in options.get("wrappers", {}).get(DIFFUSION_MODEL, {}).values() for one in some]
        return Executor(self._forward, self, around)(x, timestep, context, control, transformer_options=options)

    def _forward(self, x: Tensor, timestep: Tensor, context: Tensor, control: Any, transformer_options: Any) -> Tensor:
        img, txt = self.img_in(x.flatten(2).transpose(1, 2)), self.txt_in(context)
        vec = self.time(timestep.view(-1, 1, 1))
        replaced = transformer_options.get("patches_replace", {}).get("dit", {})
        for number, block in enumerate(self.blocks):
            if ("block", number) in replaced:

                def original(given: dict[str, Any], block: nn.Module = block) -> dict[str, Any]:
                    img, txt = block(given["img"], given["txt"], given["vec"], transformer_options)
                    return {"img": img, "txt": txt}

                out = replaced["block", number]({"img": img, "txt": txt, "vec": vec}, {"original_block": original})
                img, txt = out["img"], out["txt"]
            else:
                img, txt = block(img, txt, vec, transformer_options)
            if control is not None:
                img = img + control["output"][number]
        return self.out(img).transpose(1, 2).reshape(x.shape)


class Executor:
    """Calls wrappers, the first outermost, and then a function."""

    def __init__(self, function: Callable[..., Any], owner: Any, wrappers: list[Any]) -> None:
        self._function, self.class_obj, self._wrappers = function, owner, wrappers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._wrappers:
            return self._function(*args, **kwargs)
        return self._wrappers[0](Executor(self._function, self.class_obj, self._wrappers[1:]), *args, **kwargs)


class Base(nn.Module):
    """What a patcher holds: it has the diffusion model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.diffusion_model = Denoiser().eval().requires_grad_(False)
        self.current_patcher: Any = None
        self.current_weight_patches_uuid: Any = None

    def apply_model(self, x: Tensor, t: Tensor, **given: Any) -> Tensor:
        wrappers = given["transformer_options"].get("wrappers", {}).get(APPLY_MODEL, {})
        every = [one for some in wrappers.values() for one in some]
        return Executor(self._apply, self, every)(x, t, **given)

    def _apply(self, x: Tensor, t: Tensor, **given: Any) -> Tensor:
        return x - t.view(-1, 1, 1, 1) * self.diffusion_model(x, t, **given)


class Autoencoder(nn.Module):
    """(B, 4, H, W) latents to (B, 3, 2 H, 2 W) pixels, and back."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.decoder = nn.Sequential(
            *(nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Upsample(scale_factor=2)),
            nn.Conv2d(8, 3, 3, padding=1),
        )
        self.eval().requires_grad_(False)

    def decode(self, samples: Tensor) -> Tensor:
        return self.decoder(samples)

    def encode(self, pixels: Tensor) -> Tensor:
        return self.encoder(pixels)


class Vae:
    """What a VAE loader gives."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.first_stage_model = model or Autoencoder()
        self.patcher = types.SimpleNamespace(load_device=torch.device("cpu"))

    def throw_exception_if_invalid(self) -> None: ...

    @torch.inference_mode()
    def decode(self, samples: Tensor) -> Tensor:
        return self.first_stage_model.decode(samples)

    @torch.inference_mode()
    def encode(self, pixels: Tensor) -> Tensor:
        return self.first_stage_model.encode(pixels)


class Patcher:
    """A MODEL: clones share the model, and have options, patches and wrappers of their own."""

    def __init__(self, model: Base) -> None:
        self.model, self.load_device = model, torch.device("cpu")
        self.options: dict[str, Any] = {}
        self.patches: dict[str, Tensor] = {}
        self.wrappers: dict[str, dict[str, list[Any]]] = {}
        self.callbacks: dict[str, dict[str, list[Any]]] = {}
        self.patches_uuid = uuid.uuid4()
        self.backup: dict[str, Any] = {}
        self.hook_backup: dict[str, Any] = {}
        self.current_hooks = None

    def clone(self) -> Patcher:
        made = Patcher(self.model)
        made.options, made.patches = copy.deepcopy(self.options), dict(self.patches)
        made.patches_uuid, made.backup = self.patches_uuid, self.backup
        made.wrappers = {kind: {key: [*some] for key, some in held.items()} for kind, held in self.wrappers.items()}
        made.callbacks = {kind: {key: [*some] for key, some in held.items()} for kind, held in self.callbacks.items()}
        return made

    def with_lora(self, name: str, change: Tensor) -> Patcher:
        made = self.clone()
        made.patches[name], made.patches_uuid = change, uuid.uuid4()
        return made

    def replace_block(self, number: int, patch: Callable[..., Any]) -> Patcher:
        made = self.clone()
        made.options.setdefault("patches_replace", {}).setdefault("dit", {})["block", number] = patch
        return made

    def _held(self, where: dict[str, Any], kind: str, key: str, value: Any) -> None:
        where.setdefault(kind, {}).setdefault(key, []).append(value)

    def add_wrapper_with_key(self, kind: str, key: str, wrapper: Any) -> None:
        self._held(self.wrappers, kind, key, wrapper)

    def add_callback_with_key(self, kind: str, key: str, callback: Any) -> None:
        self._held(self.callbacks, kind, key, callback)

    def remove_wrappers_with_key(self, kind: str, key: str) -> None:
        self.wrappers.get(kind, {}).pop(key, None)

    def remove_callbacks_with_key(self, kind: str, key: str) -> None:
        self.callbacks.get(kind, {}).pop(key, None)

    def load(self) -> None:
        """Put this clone's patches on the weights that all clones share."""
        if self.model.current_weight_patches_uuid == self.patches_uuid:
            return
        for name, weight in self.backup.items():
            self._set(name, weight)
        self.backup.clear()
        for name, change in self.patches.items():
            self.backup[name] = self.model.get_parameter(name)
            self._set(name, nn.Parameter(self.backup[name] + change, requires_grad=False))
        self.model.current_weight_patches_uuid = self.patches_uuid

    def _set(self, name: str, weight: nn.Parameter) -> None:
        path, _, own = name.rpartition(".")
        setattr(self.model.get_submodule(path), own, weight)


@torch.inference_mode()
def sample(
    patcher: Patcher,
    steps: int = 3,
    size: tuple[int, int] = (4, 6),
    seed: int = 0,
    on: Any = None,
    branches: tuple[int, ...] = (0, 1),
    **given: Any,
) -> Tensor:
    """A sampler: steps with both branches of guidance in one call, which is told what its rows are."""
    patcher.load()
    patcher.model.current_patcher = patcher
    for some in patcher.callbacks.get(ON_PRE_RUN, {}).values():
        for callback in some:
            callback(patcher)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 4, *size, generator=generator)
    text = torch.randn(2, 5, TEXT, generator=generator)
    options = {**patcher.options, "wrappers": patcher.wrappers, "uuids": [uuid.uuid4()], "cond_or_uncond": [*branches]}
    for step in range(steps):
        sigma = torch.full((2,), 1 - step / steps)
        if on is not None:
            on(step)
        both = patcher.model.apply_model(
            torch.cat([x, x]), sigma, context=text, transformer_options=dict(options), **given
        )
        x = both[:1] + 2.0 * (both[1:] - both[:1])
    return x


@contextmanager
def models(folder: Path, modules: dict[str, types.ModuleType]) -> Iterator[None]:
    """ComfyUI's modules that have to do with models, beside those of `support.comfyui`; ranks import from a folder."""

    def module(name: str, **content: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        vars(made).update(content)
        return made

    def wrappers(kind: str, options: dict[str, Any]) -> list[Any]:
        return [one for some in options.get("wrappers", {}).get(kind, {}).values() for one in some]

    names = types.SimpleNamespace(APPLY_MODEL=APPLY_MODEL, DIFFUSION_MODEL=DIFFUSION_MODEL)
    extension = module(
        "comfy.patcher_extension",
        WrappersMP=names,
        CallbacksMP=types.SimpleNamespace(ON_PRE_RUN=ON_PRE_RUN),
        get_all_wrappers=wrappers,
    )
    attention = module(
        "comfy.ldm.modules.attention",
        optimized_attention=attention_split,
        attention_pytorch=F.scaled_dot_product_attention,
    )
    ldm = module("comfy.ldm", __path__=[])
    parts = module("comfy.ldm.modules", __path__=[], attention=attention)
    more = {one.__name__: one for one in (extension, attention, ldm, parts)}
    modules["comfy"].patcher_extension = extension  # type: ignore[attr-defined]
    modules["folder_paths"].__file__ = str(folder / "folder_paths.py")
    (folder / "comfy").mkdir(exist_ok=True)
    for name, content in (("__init__", ""), ("options", OPTIONS), ("cli_args", "")):
        (folder / "comfy" / f"{name}.py").write_text(content, encoding="utf-8")
    before = {name: sys.modules.get(name) for name in more}
    sys.modules.update(more)
    try:
        yield
    finally:
        for name, one in before.items():
            sys.modules.pop(name)
            if one is not None:
                sys.modules[name] = one
