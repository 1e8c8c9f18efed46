"""What people see: figures, tables, rollouts token by token. Plain data in; matplotlib and rich are an extra.

Nothing here knows an engine or a model; ``show_samples`` alone takes a tensordict, which it reads by its keys.
"""

from typing import TYPE_CHECKING

from torchrl_moe._lazy import attach

if TYPE_CHECKING:
    from torchrl_moe.render.curves import log_ratio_figure as log_ratio_figure
    from torchrl_moe.render.curves import staleness_figure as staleness_figure
    from torchrl_moe.render.curves import timeline_figure as timeline_figure
    from torchrl_moe.render.curves import training_figure as training_figure
    from torchrl_moe.render.routes import agreement_figure as agreement_figure
    from torchrl_moe.render.routes import expert_agreement as expert_agreement
    from torchrl_moe.render.routes import expert_figure as expert_figure
    from torchrl_moe.render.routes import expert_load as expert_load
    from torchrl_moe.render.routes import kept_counts as kept_counts
    from torchrl_moe.render.routes import kept_figure as kept_figure
    from torchrl_moe.render.routes import layer_agreement as layer_agreement
    from torchrl_moe.render.routes import load_figure as load_figure
    from torchrl_moe.render.routes import routes_figure as routes_figure
    from torchrl_moe.render.tokens import show_samples as show_samples
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            ".curves": "log_ratio_figure staleness_figure timeline_figure training_figure",
            ".routes": "agreement_figure expert_agreement expert_figure expert_load kept_counts kept_figure "
            "layer_agreement load_figure routes_figure",
            ".tokens": "show_samples",
        },
    )
