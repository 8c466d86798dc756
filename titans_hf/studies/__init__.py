"""Experiments: recall, stability, losses by place, and the tour. `scripts/` holds the mains."""
