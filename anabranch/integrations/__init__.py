"""Other libraries: the only place where their conventions appear."""
