"""`Ranks`: ranks and the pipelines loaded on them, as one object of a notebook, a server or a script.

The owner's process holds no weights. A call of a pipeline travels to every rank and runs there as it does under
``torchrun``; what rank 0 returns comes back.
"""

from ..followers import FollowedModel, FollowedVae, Followers
from .handle import Ranks
from .pipeline import RemotePipeline

__all__ = ["FollowedModel", "FollowedVae", "Followers", "Ranks", "RemotePipeline"]
