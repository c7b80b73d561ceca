"""The choice of a configuration: a model's work, a prediction for a configuration, the search over all."""
