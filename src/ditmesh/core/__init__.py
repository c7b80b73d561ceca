"""Building blocks of the engine and strategies: partitions, groups, patches, the call clock."""
