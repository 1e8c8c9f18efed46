"""Router replay: make a stock transformers MoE follow recorded experts (arXiv 2510.11370).

It needs transformers models and torch; it knows no engine and no tensordict.
"""
