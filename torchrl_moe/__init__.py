"""Mixture-of-Experts routing for TorchRL's LLM stack.

vLLM rollouts become TensorDicts that carry tokens, log-probs and the experts each token was routed to; the losses
replay those experts in the training forward. The rooms are imported by path (``torchrl_moe.data``,
``torchrl_moe.modules``, ...): none is loaded from here, and this file loads no dependency.
"""

import logging

__all__ = ["__version__"]

__version__ = "0.1.0"

# TorchRL imports vLLM, which warns on each CPU; its kernels have functions of ours there: see ``cpu_kernels``
logging.getLogger("vllm.triton_utils.importing").addFilter(
    lambda record: "doesn't include CPU backend" not in record.getMessage()
)
