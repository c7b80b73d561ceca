"""The samples of a run: read, checked, encoded, and put into the order in which steps see them."""
