"""Figures of plain data. Nothing here knows an engine, a model or a tensordict; matplotlib is an extra."""
