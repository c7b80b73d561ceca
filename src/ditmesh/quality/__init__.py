"""How far pictures and tensors are apart, and pages that show it."""
