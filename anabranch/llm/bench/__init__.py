"""Benchmarks that users run: latency, throughput and sweeps of the engine, load on a server."""
