"""What the balancing benchmarks share: simulated replicas, workloads, rivals."""
