"""What the engine and every strategy are made of: partitions, groups, patches, the call clock."""
