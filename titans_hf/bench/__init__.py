"""What the speed benchmarks share: the peers, the targets, the plots. `scripts/bench/` holds the mains."""
