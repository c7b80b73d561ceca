"""Reports: what a command or a tool says, once, and its writers: JSON, text for a terminal, one HTML file."""
