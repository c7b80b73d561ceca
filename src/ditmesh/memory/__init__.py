"""Memory of a rank in each phase, predicted before weights are read; free memory; and the check."""
