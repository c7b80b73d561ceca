"""ditmesh runs an unmodified diffusers DiT pipeline on N devices and draws the same picture."""

__version__ = "0.1.0.dev0"
