"""Training of diffusion transformers on the mesh that generates with them."""

from .config import TrainConfig
from .gradients import reduce_gradients

__all__ = ["TrainConfig", "reduce_gradients"]
