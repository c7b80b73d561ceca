"""Logs of a run: a CSV file, trackers."""
