"""Sequences: their tokens, their pages, and the runs of them in a step."""
