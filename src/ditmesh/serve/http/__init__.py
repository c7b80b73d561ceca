"""The HTTP side of the server: API, access and limits."""
