"""Image jobs: requests, loading, generation on every rank, receipts, and replay."""
