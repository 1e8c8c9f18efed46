"""Engines, their balancer, and the policies on top of them (namesake: ``torchrl.modules.llm``).

The public face of its rooms: code inside ``torchrl_moe.modules`` imports the files, never this one. Names load on first
use, for a policy loads vllm, ray and transformers and a balancer loads none of them. What a policy writes is of
TorchRL's classes (``Tokens``, ``LogProbs``, ...): they are here under the same names.
"""

from typing import TYPE_CHECKING

from torchrl_moe._lazy import attach

if TYPE_CHECKING:
    from torchrl.modules.llm import ChatHistory as ChatHistory
    from torchrl.modules.llm import LLMWrapperBase as LLMWrapperBase
    from torchrl.modules.llm import LogProbs as LogProbs
    from torchrl.modules.llm import Masks as Masks
    from torchrl.modules.llm import Text as Text
    from torchrl.modules.llm import Tokens as Tokens

    from torchrl_moe.errors import ReplayError as ReplayError
    from torchrl_moe.errors import RouteShapeError as RouteShapeError
    from torchrl_moe.errors import RouteValueError as RouteValueError
    from torchrl_moe.errors import UnsupportedRouterError as UnsupportedRouterError
    from torchrl_moe.modules.policies.bisect import Bisection as Bisection
    from torchrl_moe.modules.policies.bisect import EngineTrace as EngineTrace
    from torchrl_moe.modules.policies.bisect import bisect_mismatch as bisect_mismatch
    from torchrl_moe.modules.policies.probe import probe_replay as probe_replay
    from torchrl_moe.modules.policies.transformers_wrapper import TransformersWrapper as TransformersWrapper
    from torchrl_moe.modules.policies.vllm_wrapper import vLLMWrapper as vLLMWrapper
    from torchrl_moe.modules.replay.discovery import freeze_routers as freeze_routers
    from torchrl_moe.modules.replay.float32 import float32_routers as float32_routers
    from torchrl_moe.modules.replay.router_replay import Packing as Packing
    from torchrl_moe.modules.replay.router_replay import RouterReplay as RouterReplay
    from torchrl_moe.modules.serving.async_vllm import AsyncVLLM as AsyncVLLM
    from torchrl_moe.modules.serving.async_vllm import make_async_vllm_engine as make_async_vllm_engine
    from torchrl_moe.modules.serving.balancer import Lease as Lease
    from torchrl_moe.modules.serving.balancer import LoadBalancer as LoadBalancer
    from torchrl_moe.modules.serving.replica_table import FaultPolicy as FaultPolicy
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "..errors": "ReplayError RouteShapeError RouteValueError UnsupportedRouterError",
            ".policies.bisect": "Bisection EngineTrace bisect_mismatch",
            ".policies.probe": "probe_replay",
            ".policies.transformers_wrapper": "TransformersWrapper",
            ".policies.vllm_wrapper": "vLLMWrapper",
            ".replay.discovery": "freeze_routers",
            ".replay.float32": "float32_routers",
            ".replay.router_replay": "Packing RouterReplay",
            ".serving.async_vllm": "AsyncVLLM make_async_vllm_engine",
            ".serving.balancer": "Lease LoadBalancer",
            ".serving.replica_table": "FaultPolicy",
            "torchrl.modules.llm": "ChatHistory LLMWrapperBase LogProbs Masks Text Tokens",
        },
    )
