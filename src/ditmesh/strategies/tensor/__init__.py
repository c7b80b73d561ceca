"""Tensor parallelism: which weights are cut how, and a transformer that has its slices only."""
