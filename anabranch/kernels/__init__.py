"""Device code: one folder for each way to write it."""
