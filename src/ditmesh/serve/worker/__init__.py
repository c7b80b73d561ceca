"""Ranks that run pictures step by step, and their owner's side: replicas."""
