"""`Followers`: processes beside a running program that hold copies of its models and take part in their calls.

`processes` starts them, `copies` compares a model with what they have of it, `objects` carries it in `shared_memory`,
and `messages` repeats a call on all ranks. `followers` has the models, `vae` a decoder in bands.
"""

from .followers import FollowedModel, Followers
from .vae import FollowedVae

__all__ = ["FollowedModel", "FollowedVae", "Followers"]
