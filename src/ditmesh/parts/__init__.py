"""Tensors that stand for whole ones of which a rank, or a moment, has a part."""
