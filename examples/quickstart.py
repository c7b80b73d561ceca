"""torchrun --nproc-per-node 2 examples/quickstart.py

Generates an image with the embedded model on all ranks of the job. To use your own model, replace `zoo.path()` with its
folder or hub id.
"""

import torch
import torch.distributed as dist
from diffusers import DiffusionPipeline

import ditmesh
from ditmesh import ParallelConfig, zoo
from ditmesh.launch import init_from_environment

device = init_from_environment()  # gloo on the CPU, NCCL on CUDA

pipe = DiffusionPipeline.from_pretrained(zoo.path()).to(device)
pipe = ditmesh.parallelize(pipe, ParallelConfig(ulysses=dist.get_world_size()))
image = pipe("a red fox", num_inference_steps=20, generator=torch.Generator().manual_seed(0)).images[0]

if dist.get_rank() == 0:
    image.save("red-fox.png")
    print("red-fox.png")

ditmesh.restore(pipe)  # the pipeline is unchanged again
dist.destroy_process_group()
