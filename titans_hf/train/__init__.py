"""Training: recipes, the plan they amount to, the token stream, the loops. `scripts/train/` holds the mains."""
