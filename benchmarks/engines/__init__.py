"""What benchmarks of several engines on one machine share."""
