"""The assignment of requests' next steps to ranks: costs, decisions, admission. No torch, no I/O."""
