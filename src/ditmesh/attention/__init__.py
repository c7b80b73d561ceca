"""Attention across ranks: kernels by name, Ulysses, ring, masks, and the recipe that joins them."""
