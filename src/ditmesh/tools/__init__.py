"""Built on the engine: comparing configurations, studying stale strategies, telling what a machine is."""
