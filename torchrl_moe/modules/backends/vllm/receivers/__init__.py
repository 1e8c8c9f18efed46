"""The worker's end of each transport."""
