"""Jobs on disk and in memory, and their dispatch to replicas."""
