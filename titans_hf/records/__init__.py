"""What every record says of where it comes from, and how it is written."""
