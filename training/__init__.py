"""How the embedded models were trained: scripts, run from the repository's root, not part of the package."""
