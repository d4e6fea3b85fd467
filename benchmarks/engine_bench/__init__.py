"""Studies of the engine and of a server that need the source tree."""
