"""Can an engine's routes be trusted? Named checks, for any engine that has an adapter of a few methods.

``check(adapter, model=...)`` sends requests to the engine, compares its answers with what the same model computes in
transformers, and reports for each check whether it holds and how far off the engine is.
:mod:`~torchrl_moe.testing.conformance.plugin` is the same for pytest. See ``docs/engines.md``.
"""

from typing import TYPE_CHECKING

from torchrl_moe._lazy import attach

if TYPE_CHECKING:
    from torchrl_moe.testing.conformance.adapter import Answer as Answer
    from torchrl_moe.testing.conformance.adapter import EngineAdapter as EngineAdapter
    from torchrl_moe.testing.conformance.adapter import NotOffered as NotOffered
    from torchrl_moe.testing.conformance.adapter import Sampling as Sampling
    from torchrl_moe.testing.conformance.checks import CHECKS as CHECKS
    from torchrl_moe.testing.conformance.checks import check as check
    from torchrl_moe.testing.conformance.report import CheckResult as CheckResult
    from torchrl_moe.testing.conformance.report import ConformanceReport as ConformanceReport
    from torchrl_moe.testing.conformance.report import Settings as Settings
    from torchrl_moe.testing.conformance.trial import ServiceAdapter as ServiceAdapter
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            ".adapter": "Answer EngineAdapter NotOffered Sampling",
            ".checks": "CHECKS check",
            ".report": "CheckResult ConformanceReport Settings",
            ".trial": "ServiceAdapter",
        },
    )
