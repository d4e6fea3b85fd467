"""Benchmarks of the whole engine: latency, throughput, sweeps over context, scorers."""
