"""Ranks that generate images step by step, and the replicas that own them."""
