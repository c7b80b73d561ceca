"""The engine's core: what every strategy is built on."""
