"""Routes and kept tokens as data: their containers, the routes' layout, the unset marker (namesake: ``torchrl.data``).

Plain containers of tensors. Nothing here talks to an engine or to a model.
"""

from typing import TYPE_CHECKING

from torchrl_moe._lazy import attach

if TYPE_CHECKING:
    from torchrl_moe.data.kept_tokens import KeptTokens as KeptTokens
    from torchrl_moe.data.routed_experts import RoutedExperts as RoutedExperts
    from torchrl_moe.data.routing_layout import UNSET_EXPERT as UNSET_EXPERT
    from torchrl_moe.data.routing_layout import RoutingLayout as RoutingLayout
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            ".kept_tokens": "KeptTokens",
            ".routed_experts": "RoutedExperts",
            ".routing_layout": "UNSET_EXPERT RoutingLayout",
        },
    )
