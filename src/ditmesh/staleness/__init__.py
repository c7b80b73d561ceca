"""Stale strategies: which steps are synchronous, what a step is, and how far keys and values drift between steps."""
