"""The generation service: many replicas behind one engine. It knows a replica by a small protocol, not vllm or ray."""
