"""Measurements on a GPU, in ten minutes and without vLLM: ``python -m benchmarks.gpu [--kernel liger] [--tiny]``.

It needs torch, transformers, tensordict and torchrl; pytest for the tests that are marked ``gpu``. ``--tiny`` runs
everything at small sizes on a CPU, which measures nothing but shows that it runs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.gpu.head import KERNELS, head_rows
from benchmarks.gpu.measuring import Device
from benchmarks.gpu.model import model_rows
from benchmarks.gpu.sizes import LARGE, TINY, make_model
from benchmarks.report import Row, finish

ROOT = Path(__file__).parents[2]
TESTS = (
    "test/ops",
    "test/modules/replay",
    "test/contract/test_family_replay.py",
    "test/modules/serving/test_launch.py",
    "test/trainers/test_run_on_a_gpu.py",
)
"""Paths with tests that need a GPU, but no vLLM."""
MODULES = {"liger": "liger_kernel", "cut-cross-entropy": "cut_cross_entropy"}


def gpu_tests(paths: tuple[str, ...] = TESTS) -> Row:
    """Run the tests that are marked ``gpu``."""
    claim = f"tests marked gpu in {', '.join(paths)}"
    if find_spec("pytest") is None:
        return Row(claim=claim, value="not run: pytest is not installed", met=False)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-o", "addopts=--import-mode=importlib", *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).strip().splitlines()
    return Row(claim=claim, value=lines[-1] if lines else "no output", target="no failure", met=done.returncode == 0)


def read_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("--tiny", action="store_true", help="small sizes, on the CPU too: nothing is measured")
    parser.add_argument("--kernel", choices=sorted(KERNELS), help="a library of fused kernels to compare the head with")
    parser.add_argument("--no-tests", action="store_true", help="leave out the tests that are marked gpu")
    asked = parser.parse_args(arguments)
    if not asked.tiny and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --tiny runs small sizes on the CPU")
    if asked.kernel is not None and find_spec(MODULES[asked.kernel]) is None:
        parser.error(f"--kernel {asked.kernel}: {MODULES[asked.kernel]} is not installed")
    return asked


def main(arguments: list[str] | None = None) -> list[Row]:
    """Measure, print a table, and return its rows."""
    asked = read_arguments(arguments)
    sizes = TINY if asked.tiny else LARGE
    device = Device("cuda" if torch.cuda.is_available() else "cpu", sizes.repeats)
    rows = [Row(claim="device", value=str(device))]
    rows += [] if asked.no_tests else [gpu_tests()]
    peak, bandwidth = device.roofline(sizes.matmul)
    rows.append(
        Row(claim="roofline: bfloat16 product, copy", value=f"{peak / 1e12:.3g} TFLOP/s, {bandwidth / 1e9:.3g} GB/s")
    )
    rows += head_rows(device, sizes, peak, asked.kernel)
    rows += model_rows(device, sizes, make_model(sizes, device.device), peak)
    finish("gpu-tiny" if asked.tiny else "gpu", rows)
    return rows


if __name__ == "__main__":
    main()
