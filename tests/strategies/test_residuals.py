"""What is added to the tokens between blocks, and attention beside theirs: ControlNets and IP-Adapters."""

from __future__ import annotations

import diffusers
import pytest
import torch

import ditmesh
from support.models import RAGGED, inputs, relative_error, run, tiny
from support.pipelines import arguments, draw
from support.sample import sampled

NAMES = {
    "Flux": ("controlnet_block_samples", "controlnet_single_block_samples"),
    "SD3": ("block_controlnet_hidden_states",),
    "QwenImage": ("controlnet_block_samples",),
    "HunyuanDiT": ("controlnet_block_samples",),
}


def call(name, controlled=True):
    """A call as the ControlNet pipelines make it: lists of residuals, one for several blocks."""
    made, model = inputs(name, RAGGED), tiny(name)
    generator = torch.Generator().manual_seed(9)
    for arg in NAMES[name] if controlled else ():
        made[arg] = [0.3 * torch.randn(RAGGED.batch, RAGGED.image, model.inner_dim, generator=generator)]
    return made


def in_parallel(name, config):
    model = tiny(name)
    truth, plain = run(model, call(name)), run(model, call(name, False))
    # The residuals count.
    assert relative_error(plain, truth) > 1e-3
    with ditmesh.parallelized(model, config):
        found = [run(model, call(name)), run(model, call(name, False)), run(model, call(name))]
        source = ditmesh.engine_of(model).hooks[0].layout.source
    assert torch.equal(run(model, call(name)), truth)
    return [relative_error(*pair) for pair in zip(found, (truth, plain, truth), strict=True)], source


@pytest.mark.parametrize(
    ("name", "config"),
    sampled(
        NAMES, [{"ulysses": 2}, {"ring": 2, "speeds": (2, 1)}, {"data": 2}, {"ring": 2, "exchange": "displaced"}], of=2
    ),
    ids=str,
)
def test_residuals_are_cut_with_the_tokens(ranks, name, config):
    for errors, source in ranks(2).run(in_parallel, name, config):
        assert max(errors[:2]) <= 1e-5
        # A stale step follows.
        assert errors[2] <= (1e-5 if "exchange" not in config else 1)
        assert source == "derived"


def controlled_pipeline():
    """Stable Diffusion 3 with a ControlNet, of tiny random parts."""
    torch.manual_seed(2)
    transformer = tiny("SD3")
    shared = ("sample_size", "patch_size", "in_channels", "num_layers", "attention_head_dim", "num_attention_heads")
    shared += ("joint_attention_dim", "caption_projection_dim", "pooled_projection_dim", "pos_embed_max_size")
    controlnet = diffusers.SD3ControlNetModel(**{name: transformer.config[name] for name in shared}).eval()
    for parameter in controlnet.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 8),
        latent_channels=transformer.config.in_channels,
        norm_num_groups=1,
        shift_factor=0.06,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    nothing = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3")
    return diffusers.StableDiffusion3ControlNetPipeline(
        transformer=transformer,
        controlnet=controlnet,
        vae=vae.eval(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        **dict.fromkeys(nothing),
    )


def latents_of(pipe, scale=1.0):
    made = arguments("sd3", [1], steps=3)
    made |= {"control_image": torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(4))}
    # The control picture is encoded with noise of the default generator.
    torch.manual_seed(11)
    return draw(pipe, {**made, "controlnet_conditioning_scale": scale, "height": 32, "width": 32})


def pipeline(config):
    pipe = controlled_pipeline()
    truth, without = latents_of(pipe), latents_of(pipe, 0.0)
    with ditmesh.parallelized(pipe, config):
        found = [latents_of(pipe), latents_of(pipe)]
    return max(relative_error(one, truth) for one in found), relative_error(without, truth)


@pytest.mark.parametrize("config", [{"ulysses": 2}, {"cfg": 2}], ids=str)
def test_a_pipeline_with_a_controlnet(ranks, config):
    for error, control in ranks(2).run(pipeline, config):
        assert error <= 1e-5
        assert control > 1e-2


def refused(config):
    with ditmesh.parallelized(tiny("SD3"), config), pytest.raises(ditmesh.LayoutError) as caught:
        run(tiny("SD3"), call("SD3"))
    return str(caught.value)


def test_patches_refuse_residuals(ranks):
    for said in ranks(2).run(refused, {"pipe": 2}):
        assert "'block_controlnet_hidden_states'" in said
        assert "pipe=2" in said or "patches=2" in said
