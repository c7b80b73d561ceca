"""Parallel VAE in bands: every rank computes some rows of the image."""
