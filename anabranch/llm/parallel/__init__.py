"""Models over several ranks: cut weights, and processes that follow rank 0."""
