"""Which replica takes the next request: strategies, and the balancer that applies them. Nothing here waits."""
