"""Training of diffusion transformers on the mesh that generates with them."""

from .config import TrainConfig

__all__ = ["TrainConfig"]
