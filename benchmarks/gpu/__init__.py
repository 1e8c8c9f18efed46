"""Measurements on a GPU, in ten minutes and without vLLM: ``python -m benchmarks.gpu``."""
