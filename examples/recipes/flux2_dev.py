"""torchrun --nproc-per-node 2 examples/recipes/flux2_dev.py 2x48

FLUX.2-dev. Its text encoder is larger than a device of 48 GB, so rank 0 encodes the prompt in host memory (slowly, with
47 GB) and sends what came out. With 8x80: eight ranks.
"""

import gc
import sys

import torch
import torch.distributed as dist
from diffusers import DiffusionPipeline

import ditmesh
from ditmesh.launch import init_from_environment

MODEL = "black-forest-labs/FLUX.2-dev"
PROMPT = "a red fox in the snow"
WIDTH, HEIGHT, STEPS, SEED = 1024, 1024, 50, 0
DTYPE = torch.bfloat16
# Devices x GB of each.
CONFIGS = {"2x48": {"tensor": 2}, "8x80": {"ulysses": 8}}

device = init_from_environment(timeout=3600)  # the others wait while rank 0 encodes

embeds = [None]
if dist.get_rank() == 0:
    encoders = DiffusionPipeline.from_pretrained(MODEL, transformer=None, vae=None, dtype=DTYPE)
    with torch.no_grad():
        embeds[0], _ = encoders.encode_prompt(PROMPT)
    del encoders
    gc.collect()
dist.broadcast_object_list(embeds, src=0)

pipe = ditmesh.load(MODEL, CONFIGS[sys.argv[1]], dtype=DTYPE, text_encoder=None, tokenizer=None)
image = pipe(
    prompt_embeds=embeds[0].to(device),
    guidance_scale=4.0,
    width=WIDTH,
    height=HEIGHT,
    num_inference_steps=STEPS,
    generator=torch.Generator().manual_seed(SEED),
).images[0]
if dist.get_rank() == 0:
    image.save("fox.png")
dist.destroy_process_group()
