"""Budgets: a file of 300 lines (400 at most), a function of 40 (60), 8 parameters. The tests hold the outer ones."""

from __future__ import annotations

import ast

from support.sources import Function, Source, functions, package_sources, parameters, snippet

FILE_LINES, FUNCTION_LINES, PARAMETERS = 400, 60, 8

FROZEN_SIGNATURES: dict[str, str] = {
    "torchrl_moe.collectors.async_collector.AsyncLLMCollector.__init__": "TorchRL's signature, and the schedule's",
    "torchrl_moe.collectors.llm_collector.LLMCollector.__init__": "TorchRL's signature",
    "torchrl_moe.collectors.ray_async_llm_collector.RayAsyncLLMCollector.__init__": "AsyncLLMCollector's, and Ray's",
    "torchrl_moe.collectors.ray_llm_collector.RayLLMCollector.__init__": "TorchRL's signature",
    "torchrl_moe.modules.serving.service.GenerationService.generate": "TorchRL's signature, and what a request can ask",
    "torchrl_moe.modules.serving.service.GenerationService.agenerate": "generate, for one request",
    "torchrl_moe.modules.serving.service.GenerationService.score": "generate's, and how tokens were sampled",
    "torchrl_moe.modules.serving.async_vllm.AsyncVLLM.__init__": "TorchRL's names, and the service's own",
    "torchrl_moe.modules.serving.async_vllm.AsyncVLLM.from_pretrained": "TorchRL's signature, and the constructor's",
    "torchrl_moe.modules.serving.async_vllm.make_async_vllm_engine": "TorchRL's signature",
    "torchrl_moe.testing.fake_engine.FakeReplica.__init__": "whatever a test injects, each by its name",
    "torchrl_moe.testing.fake_engine.FakeAsyncVLLM.__init__": "a replica's, and the service's own",
    "torchrl_moe.modules.policies.vllm_wrapper.vLLMWrapper.__init__": "TorchRL's signature",
    "torchrl_moe.modules.policies.transformers_wrapper.TransformersWrapper.__init__": "TorchRL's, and the replay",
    "torchrl_moe.modules.policies.dense_distributions.DenseDistributions.get_dist": "TorchRL's signature",
    "torchrl_moe.objectives.grpo.GRPOLoss.__init__": "TorchRL's signature",
    "torchrl_moe.weight_update.scheme.VLLMWeightSyncScheme.__init__": "TorchRL's signature, and the scheme's choices",
}
"""Functions that users call with these names already -> why a dataclass would not do."""


def code_lines(function: Function) -> int:
    """Lines from ``def`` to the end, without the docstring."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        lines -= docstring.end_lineno - docstring.lineno + 1
    return lines


def width(function: Function) -> int:
    """Parameters without ``self`` and ``cls``."""
    return len([p for p in parameters(function) if p.arg not in {"self", "cls"}])


def violations(source: Source) -> list[str]:
    found = []
    if (lines := len(source.text.splitlines())) > FILE_LINES:
        found.append(f"{source.path}: {lines} lines, {FILE_LINES} at most")
    for name, function in functions(source.tree):
        if (lines := code_lines(function)) > FUNCTION_LINES:
            found.append(f"{source.at(function)}: {name} has {lines} lines, {FUNCTION_LINES} at most")
        if (count := width(function)) > PARAMETERS and f"{source.name}.{name}" not in FROZEN_SIGNATURES:
            found.append(f"{source.at(function)}: {name} has {count} parameters, {PARAMETERS} at most")
    return found


def test_files_functions_and_signatures_are_small() -> None:
    assert [line for source in package_sources() for line in violations(source)] == []


def test_no_exception_outlives_its_function() -> None:
    wide = {f"{s.name}.{n}" for s in package_sources() for n, f in functions(s.tree) if width(f) > PARAMETERS}
    assert set(FROZEN_SIGNATURES) - wide == set()


def test_a_long_file_is_found() -> None:
    assert violations(snippet("x = 1\n" * FILE_LINES)) == []
    assert len(violations(snippet("x = 1\n" * (FILE_LINES + 1)))) == 1


def test_a_long_function_is_found_and_its_docstring_is_free() -> None:
    docstring = '    """One.\n\n    Two.\n    """\n'
    full = "def f():\n" + docstring + "    x = 1\n" * (FUNCTION_LINES - 1)
    assert violations(snippet(full)) == []
    assert len(violations(snippet(full + "    x = 1\n"))) == 1


def test_a_wide_function_is_found_and_self_is_free() -> None:
    eight = "self, a, b, /, c, d, *e, f, g, **h"
    assert violations(snippet(f"class A:\n    async def f({eight}): pass")) == []
    assert len(violations(snippet(f"class A:\n    async def f({eight.replace('g,', 'g, i,')}): pass"))) == 1
