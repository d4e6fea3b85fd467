"""Tiles of keys and values: where they lie, how they are loaded and decoded."""
