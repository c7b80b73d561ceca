"""torchrun --nproc-per-node 2 examples/recipes/flux1_dev_int8.py 2x24

FLUX.1-dev with int8 weights (torchao): each rank has the whole transformer, and tokens are divided. It needs
`pip install torchao`.
"""

import gc
import sys

import torch
import torch.distributed as dist
from diffusers import AutoModel, DiffusionPipeline, TorchAoConfig
from torchao.quantization import Int8WeightOnlyConfig

import ditmesh
from ditmesh.launch import init_from_environment

MODEL = "black-forest-labs/FLUX.1-dev"
PROMPT = "a red fox in the snow"
WIDTH, HEIGHT, STEPS, SEED = 1024, 1024, 28, 0
DTYPE = torch.bfloat16
# Devices x GB of each.
CONFIGS = {"2x24": {"ulysses": 2}}

device = init_from_environment()

encoders = DiffusionPipeline.from_pretrained(MODEL, transformer=None, vae=None, dtype=DTYPE).to(device)
with torch.no_grad():
    embeds, pooled, _ = encoders.encode_prompt(PROMPT, None)
del encoders
gc.collect()
torch.cuda.empty_cache()

int8 = TorchAoConfig(Int8WeightOnlyConfig())
transformer = AutoModel.from_pretrained(MODEL, subfolder="transformer", quantization_config=int8, dtype=DTYPE)
without = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
pipe = DiffusionPipeline.from_pretrained(MODEL, transformer=transformer, dtype=DTYPE, **without).to(device)
pipe = ditmesh.parallelize(pipe, CONFIGS[sys.argv[1]])
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
