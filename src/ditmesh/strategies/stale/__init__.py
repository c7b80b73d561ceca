"""Token strategies that use keys and values of the step before, and when they do."""
