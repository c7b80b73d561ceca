"""Logs of a run: a CSV file, charts, trackers."""
