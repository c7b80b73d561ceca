"""Learning from what the pipeline draws: reinforcement by rewards, and distillation."""
