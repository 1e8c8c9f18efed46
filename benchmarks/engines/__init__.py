"""Shared code of benchmarks that run several engines on one machine."""
