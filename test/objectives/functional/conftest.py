"""Each function runs as it is, and captured as one graph."""

from __future__ import annotations

import pytest
import torch

from support.sequences import Run


@pytest.fixture(params=["eager", "compiled"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a function as it is, or captured as one graph without a break."""
    if request.param == "eager":
        return lambda function: function
    torch.compiler.reset()
    return lambda function: torch.compile(function, backend="eager", fullgraph=True)
