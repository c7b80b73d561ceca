"""One module per parallel strategy. A strategy knows layouts, never model names."""
