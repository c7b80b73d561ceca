"""Models in files, as ComfyUI's users have them: tiny random weights, read by ComfyUI's own loaders.

The files have the keys by which ComfyUI tells which model they are. It takes some widths of the models it knows as
given and does not read them from a file; those of a tiny model are put in their place, and nothing else is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LOADERS = ("UNETLoader", "CheckpointLoaderSimple")
# How the weights lie in the file, and ComfyUI's widget: as it reads them, or turned to 8 bits while it reads them.
WEIGHTS = ("default", "bf16 file", "fp8 file", "scaled fp8 file", "fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2")
# Widths that ComfyUI does not read from a file.
UNREAD: dict[str, tuple[str, ...]] = {
    "flux": ("context_in_dim", "hidden_size", "mlp_ratio", "num_heads", "axes_dim"),
    "sd3": (),
    "aura": ("in_channels", "out_channels", "patch_size", "dim", "n_heads", "global_conddim"),
    "lumina2": ("dim", "n_refiner_layers", "n_heads", "n_kv_heads", "axes_dims", "axes_lens"),
    "qwen": (
        *("patch_size", "out_channels", "attention_head_dim", "num_attention_heads", "joint_attention_dim"),
        *("pooled_projection_dim", "guidance_embeds", "axes_dims_rope"),
    ),
    "hunyuan_video": ("vec_in_dim", "mlp_ratio", "num_heads", "axes_dim"),
    "wan": ("text_len", "freq_dim", "text_dim", "num_heads"),
    "ltxv": ("in_channels", "attention_head_dim", "num_attention_heads", "caption_channels"),
    "cosmos": (
        *("max_img_h", "max_img_w", "max_frames", "crossattn_emb_channels", "num_blocks", "num_heads", "mlp_ratio"),
    ),
}
UNREAD["wan_i2v"] = UNREAD["vace"] = UNREAD["wan"]
UNREAD["chroma"] = (*UNREAD["flux"], "out_dim", "hidden_dim", "n_layers")


class Files:
    """A folder of models.

    Args:
        folder: which ComfyUI looks into from now on.
        built: ComfyUI's model of a family, with random weights.
        settings: of a family's model.
    """

    def __init__(self, folder: Path, built: Callable[[str], Any], settings: Callable[[str], dict[str, Any]]) -> None:
        import folder_paths

        self._folder, self._built, self._settings = folder, built, settings
        for kind in ("diffusion_models", "checkpoints", "loras"):
            (folder / kind).mkdir(exist_ok=True)
            folder_paths.add_model_folder_path(kind, str(folder / kind))

    def model(self, family: str, loader: str, weights: str) -> Any:
        """The MODEL that a loader of ComfyUI makes of a family's file, which is written if it is not there."""
        import nodes

        whole = loader == "CheckpointLoaderSimple"
        kind = "checkpoints" if whole else "diffusion_models"
        # The loader's widget, else what is in the file.
        stored = weights if weights.endswith("file") else "default"
        name = f"{family} {stored}.safetensors"
        if not (self._folder / kind / name).exists():
            self._write(self._folder / kind / name, family, whole, stored)
        with self._of_this_size(family):
            if whole:
                return nodes.CheckpointLoaderSimple().load_checkpoint(name)[0]
            return nodes.UNETLoader().load_unet(name, "default" if weights.endswith("file") else weights)[0]

    def lora(self, model: Any, seed: int, strength: float, content: Callable[[Any, int], dict[str, Any]]) -> Any:
        """What *LoraLoaderModelOnly* makes of a MODEL with a file's LoRA."""
        import nodes
        from safetensors.torch import save_file

        name = f"{type(model.model).__name__} {seed}.safetensors"
        if not (file := self._folder / "loras" / name).exists():
            save_file(content(model, seed), file)
        return nodes.LoraLoaderModelOnly().load_lora_model_only(model, name, strength)[0]

    def _write(self, file: Path, family: str, whole: bool, stored: str) -> None:
        import comfy.model_detection as detection
        import torch
        from safetensors.torch import save_file

        base = self._built(family).model
        held = base.state_dict_for_saving() if whole else base.diffusion_model.state_dict()
        prefix = detection.unet_prefix_from_state_dict(held) if whole else ""
        tensors = {name: value.clone().contiguous() for name, value in held.items() if value.numel()}
        scales: dict[str, Any] = {}
        for name, value in tensors.items():
            if stored == "bf16 file" or (stored == "fp8 file" and value.dim() != 2):
                tensors[name] = value.to(torch.bfloat16)
            elif stored == "fp8 file":
                tensors[name] = value.to(torch.float8_e4m3fn)
            elif stored == "scaled fp8 file" and value.dim() == 2 and name.endswith(".weight"):
                scale = value.abs().max() / 400
                tensors[name] = (value / scale).to(torch.float8_e4m3fn)
                scales[name.removesuffix("weight") + "scale_weight"] = scale.float().clone()
        if scales:
            # Two elements: the products themselves are not to be of 8 bits.
            tensors[f"{prefix}scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
        save_file({**tensors, **scales}, file)

    @contextmanager
    def _of_this_size(self, family: str) -> Iterator[None]:
        import comfy.model_detection as detection

        own, unread = detection.model_config_from_unet, UNREAD[family]
        settings = self._settings(family)

        def found(*args: Any, **kwargs: Any) -> Any:
            config = own(*args, **kwargs)
            wrong = {n: v for n, v in settings.items() if n not in unread and config.unet_config.get(n, v) != v}
            if wrong:
                raise AssertionError(f"ComfyUI has read {config.unet_config} from the file of {family}, not {wrong}")
            config.unet_config.update({name: settings[name] for name in unread if name in settings})
            return config

        detection.model_config_from_unet = found
        try:
            yield
        finally:
            detection.model_config_from_unet = own


@contextmanager
def partly_loaded(part: float | None) -> Iterator[None]:
    """Load models as on a card that has memory for this part of their weights; the rest is patched when it is used."""
    import comfy.model_management as management

    own = management.LoadedModel.model_load

    def model_load(self: Any, lowvram_model_memory: float = 0, force_patch_weights: bool = False) -> Any:
        memory = lowvram_model_memory
        if part is not None:
            # What is there already is not counted.
            memory = max(0.1, part * self.model.model_size() - self.model.loaded_size())
        return own(self, memory, force_patch_weights=force_patch_weights)

    management.LoadedModel.model_load = model_load
    try:
        yield
    finally:
        management.LoadedModel.model_load = own
