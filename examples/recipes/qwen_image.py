"""torchrun --nproc-per-node 2 examples/recipes/qwen_image.py 2x24

Qwen-Image, the prompts encoded before the transformer is loaded. With 2x48: two ranks; with 8x80: eight.
"""

import gc
import sys

import torch
import torch.distributed as dist
from diffusers import DiffusionPipeline

import ditmesh
from ditmesh.launch import init_from_environment

MODEL = "Qwen/Qwen-Image"
PROMPT, NEGATIVE = "a red fox in the snow", " "
WIDTH, HEIGHT, STEPS, SEED = 1024, 1024, 50, 0
DTYPE = torch.bfloat16
# Devices x GB of each.
CONFIGS = {"2x24": {"tensor": 2}, "2x48": {"cfg": 2}, "8x80": {"cfg": 2, "ulysses": 4}}

device = init_from_environment()

encoders = DiffusionPipeline.from_pretrained(MODEL, transformer=None, vae=None, dtype=DTYPE).to(device)
with torch.no_grad():
    embeds, mask = encoders.encode_prompt(PROMPT)
    negative, negative_mask = encoders.encode_prompt(NEGATIVE)
del encoders
gc.collect()
torch.cuda.empty_cache()  # what torch keeps of the encoder would count as taken

pipe = ditmesh.load(MODEL, CONFIGS[sys.argv[1]], dtype=DTYPE, text_encoder=None, tokenizer=None)
image = pipe(
    prompt_embeds=embeds,
    prompt_embeds_mask=mask,
    negative_prompt_embeds=negative,
    negative_prompt_embeds_mask=negative_mask,
    true_cfg_scale=4.0,
    width=WIDTH,
    height=HEIGHT,
    num_inference_steps=STEPS,
    generator=torch.Generator().manual_seed(SEED),
).images[0]
if dist.get_rank() == 0:
    image.save("fox.png")
dist.destroy_process_group()
