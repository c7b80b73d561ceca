"""The autoencoder in bands: every rank computes some rows of the picture, and all of them the same picture."""
