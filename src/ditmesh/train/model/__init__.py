"""Additions of a run to the model: adapters, frozen weights, compiled blocks."""
