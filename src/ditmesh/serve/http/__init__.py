"""The HTTP side: the API, who may ask, and what is answered."""
