"""Replicas on vLLM: the only room that imports vllm. It holds no balancing, no queue of requests and no tensordict."""
