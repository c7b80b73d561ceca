"""torchrun --nproc-per-node 2 examples/recipes/sd35_large.py 2x24

Stable Diffusion 3.5 Large, prompts encoded before the transformer is loaded. With 2x48: two ranks; with 8x80: eight.
"""

import gc
import sys

import torch
import torch.distributed as dist
from diffusers import DiffusionPipeline

import ditmesh
from ditmesh.launch import init_from_environment

MODEL = "stabilityai/stable-diffusion-3.5-large"
PROMPT, NEGATIVE = "a red fox in the snow", "blurry"
WIDTH, HEIGHT, STEPS, SEED = 1024, 1024, 28, 0
DTYPE = torch.bfloat16
# Devices x GB of each.
CONFIGS = {"2x24": {"cfg": 2}, "2x48": {"cfg": 2}, "8x80": {"cfg": 2, "ulysses": 4}}

device = init_from_environment()

encoders = DiffusionPipeline.from_pretrained(MODEL, transformer=None, vae=None, dtype=DTYPE).to(device)
with torch.no_grad():
    embeds, negative, pooled, negative_pooled = encoders.encode_prompt(
        PROMPT, None, None, negative_prompt=NEGATIVE, do_classifier_free_guidance=True
    )
del encoders
gc.collect()
torch.cuda.empty_cache()  # what torch keeps of the encoders would count as taken

parts = ("text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3")
pipe = ditmesh.load(MODEL, CONFIGS[sys.argv[1]], dtype=DTYPE, **dict.fromkeys(parts))
image = pipe(
    prompt_embeds=embeds,
    negative_prompt_embeds=negative,
    pooled_prompt_embeds=pooled,
    negative_pooled_prompt_embeds=negative_pooled,
    guidance_scale=4.5,
    width=WIDTH,
    height=HEIGHT,
    num_inference_steps=STEPS,
    generator=torch.Generator().manual_seed(SEED),
).images[0]
if dist.get_rank() == 0:
    image.save("fox.png")
dist.destroy_process_group()
