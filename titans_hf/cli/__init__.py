"""The `titans` command: one module per command, and what they share."""
