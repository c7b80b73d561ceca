"""Built on the engine: comparing configurations and studying stale strategies."""
