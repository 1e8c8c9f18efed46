"""Policies over tensordicts: one generates with an engine, one scores with a model. No policy does both."""
