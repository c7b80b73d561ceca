"""Names of a transformer's linear layers in its authors' code, which ComfyUI and many trainers of LoRA use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

# A star is the number of a block. Several layers of diffusers, behind what their names begin with, are the rows of one
# of the authors' layers, from the top. A tilde: diffusers has the two halves of the rows (shift and scale) in the other
# order; a question mark: in the last block. The first name of a layer is ComfyUI's.
Rows = tuple[tuple[str, str], ...]

_FLUX_BLOCKS: Rows = (
    ("double_blocks.*.img_attn.qkv", "transformer_blocks.*.attn. to_q to_k to_v"),
    ("double_blocks.*.txt_attn.qkv", "transformer_blocks.*.attn. add_q_proj add_k_proj add_v_proj"),
    ("double_blocks.*.img_attn.proj", "transformer_blocks.*.attn.to_out.0"),
    ("double_blocks.*.txt_attn.proj", "transformer_blocks.*.attn.to_add_out"),
)
_TWO_STREAMS: Rows = (
    *_FLUX_BLOCKS,
    ("double_blocks.*.img_mlp.0", "transformer_blocks.*.ff.net.0.proj"),
    ("double_blocks.*.img_mlp.2", "transformer_blocks.*.ff.net.2"),
    ("double_blocks.*.txt_mlp.0", "transformer_blocks.*.ff_context.net.0.proj"),
    ("double_blocks.*.txt_mlp.2", "transformer_blocks.*.ff_context.net.2"),
    ("double_blocks.*.img_mod.lin", "transformer_blocks.*.norm1.linear"),
    ("double_blocks.*.txt_mod.lin", "transformer_blocks.*.norm1_context.linear"),
    ("single_blocks.*.linear1", "single_transformer_blocks.*. attn.to_q attn.to_k attn.to_v proj_mlp"),
    ("single_blocks.*.linear2", "single_transformer_blocks.*.proj_out"),
    ("single_blocks.*.modulation.lin", "single_transformer_blocks.*.norm.linear"),
    ("img_in", "x_embedder"),
    ("time_in.in_layer", "time_text_embed.timestep_embedder.linear_1"),
    ("time_in.out_layer", "time_text_embed.timestep_embedder.linear_2"),
    ("vector_in.in_layer", "time_text_embed.text_embedder.linear_1"),
    ("vector_in.out_layer", "time_text_embed.text_embedder.linear_2"),
    ("guidance_in.in_layer", "time_text_embed.guidance_embedder.linear_1"),
    ("guidance_in.out_layer", "time_text_embed.guidance_embedder.linear_2"),
    ("final_layer.linear", "proj_out"),
    ("final_layer.adaLN_modulation.1", "~norm_out.linear"),
)
_FLUX: Rows = (*_TWO_STREAMS, ("txt_in", "context_embedder"))
_FLUX2: Rows = (
    *_FLUX_BLOCKS,
    ("double_blocks.*.img_mlp.0", "transformer_blocks.*.ff.linear_in"),
    ("double_blocks.*.img_mlp.2", "transformer_blocks.*.ff.linear_out"),
    ("double_blocks.*.txt_mlp.0", "transformer_blocks.*.ff_context.linear_in"),
    ("double_blocks.*.txt_mlp.2", "transformer_blocks.*.ff_context.linear_out"),
    ("single_blocks.*.linear1", "single_transformer_blocks.*.attn.to_qkv_mlp_proj"),
    ("single_blocks.*.linear2", "single_transformer_blocks.*.attn.to_out"),
    ("img_in", "x_embedder"),
    ("txt_in", "context_embedder"),
    ("time_in.in_layer", "time_guidance_embed.timestep_embedder.linear_1"),
    ("time_in.out_layer", "time_guidance_embed.timestep_embedder.linear_2"),
    ("guidance_in.in_layer", "time_guidance_embed.guidance_embedder.linear_1"),
    ("guidance_in.out_layer", "time_guidance_embed.guidance_embedder.linear_2"),
    ("double_stream_modulation_img.lin", "double_stream_modulation_img.linear"),
    ("double_stream_modulation_txt.lin", "double_stream_modulation_txt.linear"),
    ("single_stream_modulation.lin", "single_stream_modulation.linear"),
    ("final_layer.linear", "proj_out"),
    ("final_layer.adaLN_modulation.1", "~norm_out.linear"),
)
_HUNYUAN_VIDEO: Rows = (
    *_TWO_STREAMS,
    # The names of Tencent's code, where they are not ComfyUI's with a dot for an underscore.
    *(
        (f"double_blocks.*.{part}_mlp.fc{number}", f"transformer_blocks.*.{own}.net.{inner}")
        for part, own in (("img", "ff"), ("txt", "ff_context"))
        for number, inner in ((1, "0.proj"), (2, "2"))
    ),
    ("double_blocks.*.img_mod.linear", "transformer_blocks.*.norm1.linear"),
    ("double_blocks.*.txt_mod.linear", "transformer_blocks.*.norm1_context.linear"),
    ("single_blocks.*.modulation.linear", "single_transformer_blocks.*.norm.linear"),
    *(
        (f"txt_in.individual_token_refiner.blocks.*.{theirs}", f"context_embedder.token_refiner.refiner_blocks.*.{own}")
        for theirs, own in (
            ("self_attn.qkv", "attn. to_q to_k to_v"),
            ("self_attn.proj", "attn.to_out.0"),
            ("mlp.0", "ff.net.0.proj"),
            ("mlp.2", "ff.net.2"),
            ("mlp.fc1", "ff.net.0.proj"),
            ("mlp.fc2", "ff.net.2"),
            ("adaLN_modulation.1", "norm_out.linear"),
        )
    ),
    ("txt_in.input_embedder", "context_embedder.proj_in"),
    ("txt_in.t_embedder.in_layer", "context_embedder.time_text_embed.timestep_embedder.linear_1"),
    ("txt_in.t_embedder.out_layer", "context_embedder.time_text_embed.timestep_embedder.linear_2"),
    ("txt_in.t_embedder.mlp.0", "context_embedder.time_text_embed.timestep_embedder.linear_1"),
    ("txt_in.t_embedder.mlp.2", "context_embedder.time_text_embed.timestep_embedder.linear_2"),
    ("txt_in.c_embedder.in_layer", "context_embedder.time_text_embed.text_embedder.linear_1"),
    ("txt_in.c_embedder.out_layer", "context_embedder.time_text_embed.text_embedder.linear_2"),
    ("txt_in.c_embedder.linear_1", "context_embedder.time_text_embed.text_embedder.linear_1"),
    ("txt_in.c_embedder.linear_2", "context_embedder.time_text_embed.text_embedder.linear_2"),
)
_SD3: Rows = (
    ("joint_blocks.*.x_block.attn.qkv", "transformer_blocks.*.attn. to_q to_k to_v"),
    ("joint_blocks.*.x_block.attn2.qkv", "transformer_blocks.*.attn2. to_q to_k to_v"),
    ("joint_blocks.*.context_block.attn.qkv", "transformer_blocks.*.attn. add_q_proj add_k_proj add_v_proj"),
    ("joint_blocks.*.x_block.attn.proj", "transformer_blocks.*.attn.to_out.0"),
    ("joint_blocks.*.x_block.attn2.proj", "transformer_blocks.*.attn2.to_out.0"),
    ("joint_blocks.*.context_block.attn.proj", "transformer_blocks.*.attn.to_add_out"),
    ("joint_blocks.*.x_block.mlp.fc1", "transformer_blocks.*.ff.net.0.proj"),
    ("joint_blocks.*.x_block.mlp.fc2", "transformer_blocks.*.ff.net.2"),
    ("joint_blocks.*.context_block.mlp.fc1", "transformer_blocks.*.ff_context.net.0.proj"),
    ("joint_blocks.*.context_block.mlp.fc2", "transformer_blocks.*.ff_context.net.2"),
    ("joint_blocks.*.x_block.adaLN_modulation.1", "transformer_blocks.*.norm1.linear"),
    ("joint_blocks.*.context_block.adaLN_modulation.1", "?transformer_blocks.*.norm1_context.linear"),
    ("x_embedder.proj", "pos_embed.proj"),
    ("t_embedder.mlp.0", "time_text_embed.timestep_embedder.linear_1"),
    ("t_embedder.mlp.2", "time_text_embed.timestep_embedder.linear_2"),
    ("y_embedder.mlp.0", "time_text_embed.text_embedder.linear_1"),
    ("y_embedder.mlp.2", "time_text_embed.text_embedder.linear_2"),
    ("final_layer.linear", "proj_out"),
    ("final_layer.adaLN_modulation.1", "~norm_out.linear"),
)
_WAN: Rows = (
    *(
        (f"blocks.*.{theirs}_attn.{short}", f"blocks.*.attn{number}.{own}")
        for number, theirs in ((1, "self"), (2, "cross"))
        for short, own in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0"))
    ),
    ("blocks.*.cross_attn.k_img", "blocks.*.attn2.add_k_proj"),
    ("blocks.*.cross_attn.v_img", "blocks.*.attn2.add_v_proj"),
    ("blocks.*.ffn.0", "blocks.*.ffn.net.0.proj"),
    ("blocks.*.ffn.2", "blocks.*.ffn.net.2"),
    ("text_embedding.0", "condition_embedder.text_embedder.linear_1"),
    ("text_embedding.2", "condition_embedder.text_embedder.linear_2"),
    ("time_embedding.0", "condition_embedder.time_embedder.linear_1"),
    ("time_embedding.2", "condition_embedder.time_embedder.linear_2"),
    ("time_projection.1", "condition_embedder.time_proj"),
    ("img_emb.proj.1", "condition_embedder.image_embedder.ff.net.0.proj"),
    ("img_emb.proj.3", "condition_embedder.image_embedder.ff.net.2"),
    ("head.head", "proj_out"),
)
_LTX: Rows = (
    ("patchify_proj", "proj_in"),
    ("adaln_single.linear", "time_embed.linear"),
    ("adaln_single.emb.timestep_embedder.linear_1", "time_embed.emb.timestep_embedder.linear_1"),
    ("adaln_single.emb.timestep_embedder.linear_2", "time_embed.emb.timestep_embedder.linear_2"),
)
_Z_IMAGE: Rows = (
    *(
        (f"{blocks}.*.attention.{theirs}", f"{blocks}.*.attention.{own}")
        for blocks in ("layers", "noise_refiner", "context_refiner")
        for theirs, own in (("qkv", " to_q to_k to_v"), ("out", "to_out.0"))
    ),
    ("x_embedder", "all_x_embedder.2-1"),
    ("final_layer.linear", "all_final_layer.2-1.linear"),
    ("final_layer.adaLN_modulation.1", "all_final_layer.2-1.adaLN_modulation.1"),
)
_TABLES: dict[str, Rows] = {
    "ChromaTransformer2DModel": _FLUX,
    "Flux2Transformer2DModel": _FLUX2,
    "FluxTransformer2DModel": _FLUX,
    "HunyuanVideoTransformer3DModel": _HUNYUAN_VIDEO,
    "LTXVideoTransformer3DModel": _LTX,
    "SD3Transformer2DModel": _SD3,
    "WanTransformer3DModel": _WAN,
    "ZImageTransformer2DModel": _Z_IMAGE,
}
# Classes whose layers have their authors' names in diffusers.
_SAME_NAMES = ("QwenImageTransformer2DModel",)


@dataclass(frozen=True)
class OriginalLayer:
    """A layer in the authors' code.

    Attributes:
        name: its name there.
        parts: the layers of diffusers that are its rows, from the top.
        swapped: diffusers has the upper and the lower half of the rows the other way round.
    """

    name: str
    parts: tuple[str, ...]
    swapped: bool = False


def original_layers(model: nn.Module) -> list[OriginalLayer]:
    """The layers of a transformer as its authors name them, where that differs; ComfyUI's names first."""
    own = {name for name, _ in model.named_modules()}
    return [layer for row in _TABLES.get(_kind(model), ()) for layer in _expanded(row, own)]


def takes_comfyui_names(model: nn.Module) -> bool:
    """True if ComfyUI's names for a transformer's layers are known here."""
    return _kind(model) in (*_TABLES, *_SAME_NAMES)


def _kind(model: nn.Module) -> str:
    """The class of a transformer in diffusers, of which sharded ones have a subclass."""
    own = [kind.__name__ for kind in type(model).__mro__]
    return next((name for name in own if name in _TABLES or name in _SAME_NAMES), own[0])


def _expanded(row: tuple[str, str], paths: set[str]) -> Iterator[OriginalLayer]:
    theirs, ours = row
    mark, ours = (ours[0], ours[1:]) if ours[0] in "~?" else ("", ours)
    first, *others = ours.split()
    parts = tuple(f"{first}{other}" for other in others) or (first,)
    blocks = _blocks(paths, parts[0].split("*")[0]) if "*" in parts[0] else [""]
    for block in blocks:
        names = tuple(part.replace("*", block) for part in parts)
        if paths.issuperset(names):
            swapped = mark == "~" or (mark == "?" and block == blocks[-1])
            yield OriginalLayer(theirs.replace("*", block), names, swapped)


def _blocks(own: set[str], before: str) -> list[str]:
    numbers = {name.removeprefix(before).split(".")[0] for name in own if name.startswith(before)}
    return sorted((number for number in numbers if number.isdecimal()), key=int)
