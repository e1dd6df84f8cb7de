"""One way to ask for text, whoever computes it."""
