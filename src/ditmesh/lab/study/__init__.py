"""Quality of stale strategies: images and predictions compared with those of the synchronous run."""
