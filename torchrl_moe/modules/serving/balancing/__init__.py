"""Which replica takes the next request: strategies, and the balancer that asks them. Nothing here waits."""
