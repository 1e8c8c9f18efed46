"""Engines, their balancer, and the policies on top of them (namesake: ``torchrl.modules.llm``).

The public face of its rooms: code inside ``torchrl_moe.modules`` imports the files, never this one. Names load on first
use, for a policy loads vllm, ray and transformers and a balancer loads none of them.
"""

from typing import TYPE_CHECKING

from torchrl_moe._lazy import attach

if TYPE_CHECKING:
    from torchrl_moe._errors import ReplayError as ReplayError
    from torchrl_moe._errors import RouteShapeError as RouteShapeError
    from torchrl_moe._errors import RouteValueError as RouteValueError
    from torchrl_moe._errors import UnsupportedRouterError as UnsupportedRouterError
    from torchrl_moe.modules.policies.probe import probe_replay as probe_replay
    from torchrl_moe.modules.policies.transformers_wrapper import TransformersWrapper as TransformersWrapper
    from torchrl_moe.modules.policies.vllm_wrapper import vLLMWrapper as vLLMWrapper
    from torchrl_moe.modules.replay.freezing import freeze_routers as freeze_routers
    from torchrl_moe.modules.replay.incoming import Packing as Packing
    from torchrl_moe.modules.replay.router_replay import RouterReplay as RouterReplay
    from torchrl_moe.modules.serving.async_vllm import AsyncVLLM as AsyncVLLM
    from torchrl_moe.modules.serving.async_vllm import make_async_vllm_engine as make_async_vllm_engine
    from torchrl_moe.modules.serving.balancing.balancer import LoadBalancer as LoadBalancer
    from torchrl_moe.modules.serving.fault_policy import FaultPolicy as FaultPolicy
    from torchrl_moe.modules.serving.lease import Lease as Lease
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "AsyncVLLM": ".serving.async_vllm",
            "FaultPolicy": ".serving.fault_policy",
            "Lease": ".serving.lease",
            "LoadBalancer": ".serving.balancing.balancer",
            "Packing": ".replay.incoming",
            "ReplayError": ".._errors",
            "RouteShapeError": ".._errors",
            "RouteValueError": ".._errors",
            "RouterReplay": ".replay.router_replay",
            "TransformersWrapper": ".policies.transformers_wrapper",
            "UnsupportedRouterError": ".._errors",
            "freeze_routers": ".replay.freezing",
            "make_async_vllm_engine": ".serving.async_vllm",
            "probe_replay": ".policies.probe",
            "vLLMWrapper": ".policies.vllm_wrapper",
        },
    )
