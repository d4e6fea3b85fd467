"""Benchmarks: cases, implementations, timing and results, and one runner for all."""
