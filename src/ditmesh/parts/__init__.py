"""Tensors with a whole shape and distributed or pending values."""
