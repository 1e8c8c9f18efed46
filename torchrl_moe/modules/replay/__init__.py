"""Router replay: make a stock transformers MoE follow recorded experts (arXiv 2510.11370).

It needs only torch and transformers models, and depends neither on an engine nor on tensordict.
"""
