"""Distances between images and between tensors."""
