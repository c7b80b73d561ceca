"""torchrun --nproc-per-node 2 examples/recipes/wan21_14b.py 2x24

Wan 2.1 14B, the prompts encoded before the transformer is loaded. With 2x48: two ranks; with 8x80: eight. To write the
file diffusers needs `pip install imageio imageio-ffmpeg`.
"""

import gc
import sys

import torch
import torch.distributed as dist
from diffusers import DiffusionPipeline
from diffusers.utils import export_to_video

import ditmesh
from ditmesh.launch import init_from_environment

MODEL = "Wan-AI/Wan2.1-T2V-14B-Diffusers"
PROMPT, NEGATIVE = "a red fox runs through the snow", "blurry, still"
FRAMES, STEPS, SEED = 81, 50, 0
DTYPE = torch.bfloat16
# Devices x GB of each: the configuration, and the size that fits.
CONFIGS = {
    "2x24": ({"tensor": 2}, (832, 480)),
    "2x48": ({"cfg": 2}, (1280, 720)),
    "8x80": ({"cfg": 2, "ulysses": 4}, (1280, 720)),
}

device = init_from_environment()
config, (width, height) = CONFIGS[sys.argv[1]]

encoders = DiffusionPipeline.from_pretrained(MODEL, transformer=None, vae=None, dtype=DTYPE).to(device)
with torch.no_grad():
    embeds, negative = encoders.encode_prompt(PROMPT, NEGATIVE, max_sequence_length=512)
del encoders
gc.collect()
torch.cuda.empty_cache()  # what torch keeps of the encoder would count as taken

pipe = ditmesh.load(MODEL, config, dtype=DTYPE, text_encoder=None, tokenizer=None)
frames = pipe(
    prompt_embeds=embeds,
    negative_prompt_embeds=negative,
    guidance_scale=5.0,
    width=width,
    height=height,
    num_frames=FRAMES,
    num_inference_steps=STEPS,
    generator=torch.Generator().manual_seed(SEED),
).frames[0]
if dist.get_rank() == 0:
    export_to_video(frames, "fox.mp4", fps=16)
dist.destroy_process_group()
