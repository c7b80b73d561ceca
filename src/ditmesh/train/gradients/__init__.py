"""Gradients of a step over the ranks: summed, ordered, sharded."""
