"""The memory of a rank in training, predicted before weights are read; and the check before a run."""
