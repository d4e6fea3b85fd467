"""Benchmarks of attention: one runner, cases, implementations, peers, timing, results."""
