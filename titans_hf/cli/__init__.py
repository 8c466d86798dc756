"""The `titans` command: one module a command, and what they share."""
