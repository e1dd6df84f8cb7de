"""Known beforehand: what a checkpoint reads per token, how fast that can be at most, and what fits where."""
