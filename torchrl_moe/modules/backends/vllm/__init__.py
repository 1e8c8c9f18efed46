"""Replicas on vLLM, which only this folder and ``_compat*`` import. There is no balancing and no tensordict here."""
