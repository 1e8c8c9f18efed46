"""A weight update inside an engine: its process, its workers, and what both look at."""
