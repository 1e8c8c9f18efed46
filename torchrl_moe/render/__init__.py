"""What people see: figures, tables, rollouts token by token. Plain data in; matplotlib and rich are an extra.

Nothing here knows an engine or a model; ``show_samples`` alone takes a tensordict, which it reads by its keys.
"""

from typing import TYPE_CHECKING

from torchrl_moe._lazy import attach

if TYPE_CHECKING:
    from torchrl_moe.render.agreements import agreement_figure as agreement_figure
    from torchrl_moe.render.agreements import layer_agreement as layer_agreement
    from torchrl_moe.render.curves import training_figure as training_figure
    from torchrl_moe.render.heatmaps import expert_agreement as expert_agreement
    from torchrl_moe.render.heatmaps import expert_figure as expert_figure
    from torchrl_moe.render.heatmaps import expert_load as expert_load
    from torchrl_moe.render.histograms import log_ratio_figure as log_ratio_figure
    from torchrl_moe.render.kept_numbers import kept_counts as kept_counts
    from torchrl_moe.render.kept_numbers import kept_figure as kept_figure
    from torchrl_moe.render.loads import load_figure as load_figure
    from torchrl_moe.render.route_maps import routes_figure as routes_figure
    from torchrl_moe.render.samples import show_samples as show_samples
    from torchrl_moe.render.staleness import staleness_figure as staleness_figure
    from torchrl_moe.render.timelines import timeline_figure as timeline_figure
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "agreement_figure": ".agreements",
            "expert_agreement": ".heatmaps",
            "expert_figure": ".heatmaps",
            "expert_load": ".heatmaps",
            "kept_counts": ".kept_numbers",
            "kept_figure": ".kept_numbers",
            "layer_agreement": ".agreements",
            "load_figure": ".loads",
            "log_ratio_figure": ".histograms",
            "routes_figure": ".route_maps",
            "show_samples": ".samples",
            "staleness_figure": ".staleness",
            "timeline_figure": ".timelines",
            "training_figure": ".curves",
        },
    )
