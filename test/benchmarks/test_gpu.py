"""What is to run on a GPU runs in small on a CPU, without vLLM and Ray; the kernel libraries are called as they say."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import report
from benchmarks.gpu.__main__ import ROOT, TESTS, gpu_tests, main, read_arguments
from benchmarks.gpu.head import head_rows
from benchmarks.gpu.measuring import Device
from benchmarks.gpu.sizes import LARGE, TINY


def test_all_of_it_runs_in_small_without_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("vllm", "ray"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    main(["--tiny", "--no-tests"])
    printed = capsys.readouterr().out
    wanted = ["| self-test, bfloat16, grouped_mm | passed | bit-equal | yes |", "replayed over live", "GRPOLoss under"]
    assert [line for line in wanted if line not in printed] == []
    assert "**no**" not in printed
    assert (tmp_path / "gpu-tiny.json").exists()


@pytest.mark.parametrize(("passes", "summary"), [(True, "1 passed, 1 deselected"), (False, "1 failed, 1 deselected")])
def test_tests_are_run_that_are_marked(tmp_path: Path, passes: bool, summary: str) -> None:
    tests = f"import pytest\n@pytest.mark.gpu\ndef test_a(): assert {passes}\ndef test_b(): assert False\n"
    (tmp_path / "test_two.py").write_text(tests)
    assert all((ROOT / path).exists() for path in TESTS)
    row = gpu_tests((str(tmp_path / "test_two.py"),))
    assert row.met == passes
    assert summary in row.value


def test_a_run_without_a_gpu_or_a_library_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    wrong: dict[tuple[str, ...], str] = {("--tiny", "--kernel", "liger"): "liger_kernel is not installed"}
    if not torch.cuda.is_available():
        wrong[()] = "there is no CUDA device; --tiny runs small sizes"
    for arguments, message in wrong.items():
        with pytest.raises(SystemExit):
            read_arguments(list(arguments))
        assert message in capsys.readouterr().err


def plain(hidden: Tensor, weight: Tensor, words: Tensor, **more: Any) -> Tensor:
    return torch.nn.functional.cross_entropy((hidden @ weight.T).float(), words, **more)


@pytest.mark.parametrize(
    ("kernel", "module", "name"),
    [
        ("liger", "liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy"),
        ("cut-cross-entropy", "cut_cross_entropy", "linear_cross_entropy"),
    ],
)
def test_a_kernel_library_is_compared(monkeypatch: pytest.MonkeyPatch, kernel: str, module: str, name: str) -> None:
    """Stand-ins with the libraries' signatures: those themselves want a GPU."""
    parts = module.split(".")
    for i in range(len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[: i + 1]), ModuleType(".".join(parts[: i + 1])))
    setattr(sys.modules[module], name, plain)
    rows = {row.claim: row.value for row in head_rows(Device("cpu", 1), TINY, 1e9, kernel)}
    assert float(rows[f"head: {kernel}, mean log-prob, difference from tiles"]) < 1e-2
    assert float(rows[f"head: time of {kernel} over tiles"]) > 0


def test_sizes_are_those_of_the_model_of_the_docs() -> None:
    """Of Qwen3-30B-A3B: 3.0 of its 30.5 billion weights are used by a token in 48 layers, head and embedding apart."""
    weights = (LARGE.body_flops / LARGE.layers / LARGE.tokens - 6 * LARGE.heads * LARGE.head_dim * LARGE.length) / 6
    assert 48 * weights / 1e9 == pytest.approx(2.7, abs=0.1)
    assert LARGE.tokens == 16_384
