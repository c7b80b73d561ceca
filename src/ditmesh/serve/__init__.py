"""The server: a persistent queue of jobs, ranks that batch them step by step, and the HTTP API over both."""
