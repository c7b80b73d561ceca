"""Jobs: on disk, in memory, and given to replicas."""
