"""Grammars: which tokens an answer may have, by what it must match."""
