"""What the engine is made of: plain data and protocols that every strategy shares."""
