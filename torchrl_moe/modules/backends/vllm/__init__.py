"""Replicas on vLLM; only this folder and ``_compat*`` import it. No balancing, no request queue, no tensordict is
here."""
