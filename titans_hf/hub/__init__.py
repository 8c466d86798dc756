"""Model cards, loading, and pushing to the Hub."""
