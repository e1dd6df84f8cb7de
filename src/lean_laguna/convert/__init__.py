"""Checkpoint in, checkpoint out: quantise, extend the context, change a drafter's format."""
