"""python examples/ranks.py

Starts two ranks, loads the embedded model on them, and calls its proxy in this process. To use your own model, replace
`emoji-sd3` with its folder or hub id.
"""

import torch

import ditmesh

# The ranks import this file too, and must not start further ranks.
if __name__ == "__main__":
    with ditmesh.Ranks(2) as ranks:
        pipe = ranks.load("emoji-sd3", {"cfg": 2})
        for seed, prompt in enumerate(("a red fox", "a cactus")):
            generator = torch.Generator().manual_seed(seed)
            image = pipe(prompt, num_inference_steps=10, generator=generator).images[0]
            name = f"{prompt.replace(' ', '-')}.png"
            image.save(name)
            print(name)
