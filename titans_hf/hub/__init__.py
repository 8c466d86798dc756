"""Model cards, and the way to the Hub."""
