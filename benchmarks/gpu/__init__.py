"""What a GPU is asked, in ten minutes and without vLLM: ``python -m benchmarks.gpu``."""
