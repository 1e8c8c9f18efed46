"""Policies over tensordicts, on an engine or on a model: each either generates or scores, and has versions of both."""
