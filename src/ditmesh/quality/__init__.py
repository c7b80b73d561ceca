"""How far pictures and tensors are apart."""
