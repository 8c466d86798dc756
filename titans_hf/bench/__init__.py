"""Benchmarks: speed beside peers, long streams, the kernels. `scripts/bench/` holds the mains."""
