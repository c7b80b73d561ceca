"""Comparison of configurations with one device: `runs` runs on ranks, `steps` compares there, `verdicts` judges."""
