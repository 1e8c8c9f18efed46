"""The OpenAI-compatible endpoint for agent harnesses: ``serve_http`` and its sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrl_moe._lazy import attach

if TYPE_CHECKING:
    from torchrl_moe.http.harness import HarnessEnv as HarnessEnv
    from torchrl_moe.http.harness import run_process as run_process
    from torchrl_moe.http.server import HttpServer as HttpServer
    from torchrl_moe.http.server import serve_http as serve_http
    from torchrl_moe.http.sessions import Limits as Limits
    from torchrl_moe.http.trajectories import load_trajectories as load_trajectories

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        ".harness": "HarnessEnv run_process",
        ".server": "HttpServer serve_http",
        ".sessions": "Limits",
        ".trajectories": "load_trajectories",
    },
)
