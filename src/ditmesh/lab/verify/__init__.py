"""What `ditmesh verify` writes beside its verdicts: a page, and timelines of ranks."""
