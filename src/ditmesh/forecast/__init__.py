"""Which configuration, why, and how sure: a model's work, a prediction for a configuration, the search over all."""
