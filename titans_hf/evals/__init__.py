"""Benchmarks: lm-eval's tasks, the paper's tables as data, the records of evaluations and their tables."""
