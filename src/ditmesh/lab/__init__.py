"""Instruments to look at ditmesh with: see README.md."""
