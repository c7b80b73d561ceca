"""Warm-up policies of stale strategies, their control, and the drift of keys and values between steps."""

# Its policies are known wherever policies are read.
