"""Lists of keys, shared prefixes and draft trees: cases and implementations of each."""
