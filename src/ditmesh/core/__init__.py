"""What every strategy is made of: patches and call chains, block hooks, the request, the strategy protocol."""
