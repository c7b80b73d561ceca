"""The cost of a step: figures of hardware and of a model's work, and the strategies' terms from both."""
