"""torchrun --nproc-per-node 2 examples/recipes/flux1_dev.py 2x24

FLUX.1-dev, the prompt encoded before the transformer is loaded. With 2x48: two ranks; with 8x80: eight.
"""

import gc
import sys

import torch
import torch.distributed as dist
from diffusers import DiffusionPipeline

import ditmesh
from ditmesh.launch import init_from_environment

MODEL = "black-forest-labs/FLUX.1-dev"
PROMPT = "a red fox in the snow"
WIDTH, HEIGHT, STEPS, SEED = 1024, 1024, 28, 0
DTYPE = torch.bfloat16
# Devices x GB of each.
CONFIGS = {"2x24": {"tensor": 2}, "2x48": {"ulysses": 2}, "8x80": {"ulysses": 8}}

device = init_from_environment()

encoders = DiffusionPipeline.from_pretrained(MODEL, transformer=None, vae=None, dtype=DTYPE).to(device)
with torch.no_grad():
    embeds, pooled, _ = encoders.encode_prompt(PROMPT, None)
del encoders
gc.collect()
torch.cuda.empty_cache()  # what torch keeps of the encoders would count as taken

without = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
pipe = ditmesh.load(MODEL, CONFIGS[sys.argv[1]], dtype=DTYPE, **without)
image = pipe(
    prompt_embeds=embeds,
    pooled_prompt_embeds=pooled,
    guidance_scale=3.5,
    width=WIDTH,
    height=HEIGHT,
    num_inference_steps=STEPS,
    generator=torch.Generator().manual_seed(SEED),
).images[0]
if dist.get_rank() == 0:
    image.save("fox.png")
dist.destroy_process_group()
