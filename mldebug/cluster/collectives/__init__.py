"""comms(): how fast the collectives are, and whether what they deliver is right."""
