"""Additions of a run to the model: adapters, frozen weights, dropout, compiled blocks, a part of the tokens."""
