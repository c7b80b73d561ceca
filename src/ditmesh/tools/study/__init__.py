"""What stale strategies cost in quality: pictures and predictions against those of the synchronous run."""
