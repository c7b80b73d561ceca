"""Memory that a rank needs, phase by phase, before any weights are read; what a device has; the check of both."""
