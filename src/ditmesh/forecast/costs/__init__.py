"""What a step costs: hardware as figures, a model's work as figures, and the terms that strategies add up from both."""
