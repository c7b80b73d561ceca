"""Update of the weights: optimizers, learning rates, loss scales."""
