"""Training on islands: outer steps over slow links."""
