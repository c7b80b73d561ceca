"""A run's folder: checkpoints, resuming, the exported weights."""
