"""Policies over tensordicts, backed by an engine or a model: each generates or scores, and has versions of both."""
