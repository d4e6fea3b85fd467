"""Launches that cost what a launch costs: all else is known after the first call of a kind."""
