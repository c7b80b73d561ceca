"""Configurations against one device: `tracing` looks, `runs` is what ranks do, `verdicts` what is said about it."""
