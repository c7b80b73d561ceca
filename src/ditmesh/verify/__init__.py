"""Comparison of configurations with one device: `tracing` observes, `runs` runs on ranks, `verdicts` judges."""
