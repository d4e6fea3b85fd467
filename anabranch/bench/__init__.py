"""Benchmarks: cases, implementations, timing and results behind one runner."""
