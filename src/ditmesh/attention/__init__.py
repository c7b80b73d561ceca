"""Attention across ranks: the door, local kernels, Ulysses, ring."""
