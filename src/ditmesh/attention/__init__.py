"""Attention across ranks: kernels by name, Ulysses, ring, masks, and the mixer that combines them."""
