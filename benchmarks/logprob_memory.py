"""What a loss costs in memory and time, forward and backward, entropy included: ours against TorchRL's.

Same model, same batch: TorchRL's ``TransformersWrapper`` and ``GRPOLoss``, and ours without replay. The body of the
model is small, so that head and loss dominate: with a large body the ratio of times is nearer to 1. Each
measurement runs in its own process; memory is the growth of the peak resident set over a whole step, the
parameters' gradients included.

Then the head alone, over the whole vocabulary and over what a sampler kept: lists of 20 kept tokens, of some hundreds,
and of 5 excluded ones.

``python -m benchmarks.logprob_memory [--quick]``. The curves go to ``runs/bench/logprob_memory.png``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from benchmarks.report import RESULTS, Row, finish, median_range

MEMORY_GOAL, MEMORY_GOAL_LARGE, TIME_GOAL, RAGGED_GOAL = 10.0, 12.0, 0.55, 0.15
KEPT_GOAL = 1.10
PEERS = ("torchrl", "torchrl_moe")
SAMPLERS = {"all words": 0, "top_k 20": 20, "top_p, 400 words on average": 400, "5 bans": -5}
"""Sampling setting -> size of a token's list of words for ``selected_log_probs``; negative: excluded words."""
QWEN_VOCABULARY = 151_936
DENSE_COPIES = 10
"""Upper bound of TorchRL's memory, in copies of the float32 logits, to decide beforehand whether a case fits."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a batch."""

    vocabulary: int
    lengths: tuple[int, ...]
    prompt: int = 32
    hidden: int = 256
    steps: int = 3

    @property
    def tokens(self) -> int:
        """Tokens of the batch as TorchRL pads it."""
        return max(self.lengths) * len(self.lengths)


@dataclass(frozen=True, slots=True)
class Measured:
    """``bytes`` of one step, ``seconds`` of each later one, and the values on which both losses must agree."""

    bytes: int
    seconds: list[float]
    loss: float
    gradient: float


def make_batch(case: Case) -> TensorDictBase:
    """Return rollouts of random tokens, with TorchRL's keys."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for length in case.lengths:
        ids = torch.randint(0, case.vocabulary, (length,), generator=generator)
        answered = torch.arange(length) >= case.prompt
        log_probs = torch.full((length,), -torch.tensor(float(case.vocabulary)).log()).masked_fill(~answered, torch.nan)
        samples.append(
            TensorDict(
                {
                    "tokens": {"prompt": ids[: case.prompt], "response": ids[case.prompt :], "full": ids},
                    "masks": {
                        "all_attention_mask": torch.ones(length, dtype=torch.bool),
                        "all_assistant_mask": answered,
                    },
                    "log_probs": {"full": log_probs},
                    "advantage": torch.randn(1, 1, generator=generator),
                }
            )
        )
    return lazy_stack(samples)


def make_loss(peer: str, case: Case) -> tuple[Any, Any]:
    """Return the loss of one of the peers, and its model."""
    from torchrl_moe.testing import make_tiny_moe

    model = make_tiny_moe(vocab_size=case.vocabulary, hidden_size=case.hidden, num_hidden_layers=2).train()
    model.lm_head.weight.data.mul_(0.2)  # entropies of a trained model, not of a distribution on one word
    if peer == "torchrl":
        from torchrl.modules.llm.policies import TransformersWrapper as TorchRLWrapper
        from torchrl.objectives.llm import GRPOLoss as TorchRLLoss

        from torchrl_moe.testing import ByteTokenizer

        options: dict[str, Any] = {"generate": False, "return_log_probs": True, "pad_output": False}
        actor: Any = TorchRLWrapper(model, tokenizer=ByteTokenizer(), input_mode="tokens", **options)
        return TorchRLLoss(actor, entropy_bonus=True), model
    from torchrl_moe.modules import TransformersWrapper
    from torchrl_moe.objectives import GRPOLoss

    return GRPOLoss(TransformersWrapper(model, replay="none"), entropy_bonus=True), model


def forward(loss: Any, td: TensorDictBase) -> torch.Tensor:
    """Return the sum of the loss terms."""
    out = loss(td.copy())
    return out.loss_objective.squeeze() + out.loss_entropy.squeeze()


def resident(name: str) -> int:
    """Return ``VmRSS`` or ``VmHWM`` of this process in bytes (Linux)."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def work(peer: str, case: Case) -> Measured:
    """Measure one peer in this process: a small step to warm up, one for memory, the others for time."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if peer in SAMPLERS:
        return score(peer, case)
    loss, model = make_loss(peer, case)
    forward(loss, make_batch(Case(vocabulary=case.vocabulary, lengths=(8, 6), prompt=2))).backward()
    model.zero_grad()
    td = make_batch(case)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    total = forward(loss, td)
    total.backward()
    peak = resident("VmHWM") - before
    gradient = float(model.lm_head.weight.grad.norm())
    seconds = []
    for _ in range(case.steps):
        model.zero_grad()
        start = time.perf_counter()
        forward(loss, td).backward()
        seconds.append(time.perf_counter() - start)
    return Measured(peak, seconds, float(total.detach()), gradient)


def kept_tokens(tokens: torch.Tensor, size: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return lists of ``size`` words for each row, or of 1 to ``2 size`` in a top_p's case; ``None`` for all words."""
    generator = torch.Generator().manual_seed(1)
    if not size:
        return None
    sizes = torch.full((len(tokens),), size)
    if size > 100:
        sizes = torch.randint(1, 2 * size, (len(tokens),), generator=generator)
    last = sizes.abs().cumsum(0) - 1
    rows = torch.arange(len(tokens)).repeat_interleave(sizes.abs())
    ids = tokens[rows] + torch.randint(1, vocabulary, (len(rows),), generator=generator)  # any word but the token
    if size > 0:
        ids[last] = tokens
    return (ids % vocabulary).int(), sizes.int()


def score(sampler: str, case: Case) -> Measured:
    """Measure ``selected_log_probs`` in this process: a small step to warm up, one for memory, the others for time."""
    from torchrl_moe.ops import selected_log_probs

    torch.manual_seed(0)
    hidden, weight = torch.randn(case.tokens, case.hidden), torch.randn(case.vocabulary, case.hidden)
    weight.mul_(case.hidden**-0.5).requires_grad_()  # logits of variance 1
    tokens = torch.randint(0, case.vocabulary, (case.tokens,))
    kept = kept_tokens(tokens, SAMPLERS[sampler], case.vocabulary)

    def step(rows: int, kept: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        inputs = [hidden[:rows].requires_grad_(), weight]
        log_probs, entropy = selected_log_probs(*inputs, tokens[:rows], kept=kept)
        assert entropy is not None
        torch.autograd.grad(log_probs.mean() + entropy.mean(), inputs)

    step(8, None)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    step(case.tokens, kept)
    peak = resident("VmHWM") - before
    seconds = []
    for _ in range(case.steps):
        start = time.process_time()
        step(case.tokens, kept)
        seconds.append(time.process_time() - start)
    return Measured(peak, seconds, 0.0, 0.0)


def kept_rows(quick: bool) -> list[Row]:
    """Compare the cost of the head over kept tokens with that over all words."""
    case = (
        Case(vocabulary=2_048, lengths=(64,), hidden=64)
        if quick
        else Case(vocabulary=32_768, lengths=(1_024,), hidden=1_024)
    )
    runs = [{sampler: Measured(**measure(sampler, case)) for sampler in SAMPLERS} for _ in range(1 if quick else 3)]
    rows = []
    for sampler in list(SAMPLERS)[1:]:
        pairs = [(run["all words"], run[sampler]) for run in runs]
        memory = [kept.bytes / whole.bytes for whole, kept in pairs]
        seconds = [statistics.median(kept.seconds) / statistics.median(whole.seconds) for whole, kept in pairs]
        for what, ratios_ in (("peak memory", memory), ("CPU seconds", seconds)):
            rows.append(
                Row(
                    claim=f"V={case.vocabulary}, {case.tokens} tokens, {sampler}: {what} of the head's step",
                    value=f"{median_range(ratios_)} of that over all words",
                    target="" if quick else f"<= {KEPT_GOAL:.2f}x",
                    met=None if quick else statistics.median(ratios_) <= KEPT_GOAL,
                )
            )
    return rows


def measure(peer: str, case: Case, module: str = "benchmarks.logprob_memory") -> Any:
    """Run :func:`work` of a benchmark in a new process."""
    command = [sys.executable, "-m", module, "--worker", json.dumps([peer, asdict(case)])]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise RuntimeError(f"{peer}, {case}: ended with {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def answer(text: str, work: Callable[[str, Case], Any]) -> None:
    """Run in the process that :func:`measure` started."""
    peer, case = json.loads(text)
    print(json.dumps(asdict(work(peer, Case(**{**case, "lengths": tuple(case["lengths"])})))))


def compare(case: Case, pairs: int = 1) -> dict[str, list[Measured]]:
    """Measure both peers in turn; check that they computed the same."""
    results: dict[str, list[Measured]] = {peer: [] for peer in PEERS}
    for _ in range(pairs):
        for peer in PEERS:
            results[peer].append(Measured(**measure(peer, case)))
    theirs, ours = (results[peer][0] for peer in PEERS)
    for name in ("loss", "gradient"):
        a, b = getattr(theirs, name), getattr(ours, name)
        if abs(a - b) > 1e-3 * max(abs(a), 1e-3):
            raise RuntimeError(f"{case}: the peers' {name} differ, {a} and {b}: their times cannot be compared")
    memory, seconds = ratios(results)
    shape = f"V={case.vocabulary}, lengths {case.lengths}"
    print(f"{shape}: memory 1/{1 / memory:.1f}, time {statistics.median(seconds):.2f}x", flush=True)
    return results


def ratios(results: dict[str, list[Measured]]) -> tuple[float, list[float]]:
    """Return the ratios of ours to theirs: median memory, and times pair by pair."""
    memory = [statistics.median(run.bytes for run in results[peer]) for peer in PEERS]
    theirs, ours = ([statistics.median(run.seconds) for run in results[peer]] for peer in PEERS)
    return memory[1] / memory[0], [b / a for a, b in zip(theirs, ours, strict=True)]


def memory_row(claim: str, results: dict[str, list[Measured]], goal: float | None) -> Row:
    """Compare peaks."""
    theirs, ours = (statistics.median(run.bytes for run in results[peer]) for peer in PEERS)
    return Row(
        claim=f"{claim}: peak memory of a step",
        value=f"{theirs / 1e9:.2f} GB -> {ours / 1e9:.2f} GB, 1/{theirs / ours:.1f}",
        target="" if goal is None else f"<= 1/{goal:.0f}",
        met=None if goal is None else theirs >= goal * ours,
    )


def time_row(claim: str, results: dict[str, list[Measured]], goal: float | None) -> Row:
    """Compare medians of pairs."""
    theirs, ours = (statistics.median(s for run in results[peer] for s in run.seconds) for peer in PEERS)
    times = ratios(results)[1]
    return Row(
        claim=f"{claim}: seconds of a step",
        value=f"{theirs:.2f} -> {ours:.2f}, {median_range(times)} of TorchRL's",
        target="" if goal is None else f"<= {goal:.2f}x",
        met=None if goal is None else statistics.median(times) <= goal,
    )


def large_case(available: float) -> Case | None:
    """Return the largest batch of Qwen's vocabulary whose dense step fits in the memory given."""
    for width in (512, 384, 256, 192, 128, 64):
        case = Case(vocabulary=QWEN_VOCABULARY, lengths=(width,) * 8, steps=1)
        if 4 * DENSE_COPIES * case.tokens * case.vocabulary + 2e9 <= available:
            return case
    return None


def free_memory() -> float:
    """Return this machine's available memory minus a reserve, at most 20 GB."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    assert found is not None
    return min(20e9, 0.85 * int(found[1]) * 1024)


def large_rows() -> list[Row]:
    """Compare on Qwen's vocabulary, if there is room for TorchRL's step."""
    free = free_memory()
    case = large_case(free)
    if case is None:
        return [
            Row(claim=f"V={QWEN_VOCABULARY}", value=f"skipped: {free / 1e9:.0f} GB free do not hold TorchRL's step")
        ]
    results, claim = compare(case), f"V={QWEN_VOCABULARY}, 8 x {max(case.lengths)}"
    return [memory_row(claim, results, MEMORY_GOAL_LARGE), time_row(claim, results, None)]


def curves() -> None:
    """Draw memory and time over V and over T."""
    from matplotlib.figure import Figure

    words, widths = (8_192, 16_384, 32_768, 65_536), (64, 128, 256, 512)
    sweeps = {
        "words, 256 tokens per sequence": [(v, Case(vocabulary=v, lengths=(256,) * 8, steps=1)) for v in words],
        "tokens per sequence, 32 768 words": [(t, Case(vocabulary=32_768, lengths=(t,) * 8, steps=1)) for t in widths],
    }
    figure = Figure(figsize=(10, 6), layout="constrained")
    grid = figure.subplots(2, 2)
    for column, (label, cases) in enumerate(sweeps.items()):
        found = [compare(case) for _, case in cases]
        x = [at for at, _ in cases]
        for peer in PEERS:
            grid[0, column].plot(x, [run[peer][0].bytes / 1e9 for run in found], "o-", label=peer)
            grid[1, column].plot(x, [run[peer][0].seconds[0] for run in found], "o-", label=peer)
        grid[1, column].set_xlabel(label)
        for axes, what in zip(grid[:, column], ("peak GB of a step", "seconds of a step"), strict=True):
            axes.set(ylabel=what, xscale="log", yscale="log")
            axes.grid(alpha=0.3)
    grid[0, 0].legend(frameon=False)
    figure.suptitle("GRPO loss, forward and backward, 8 sequences")
    RESULTS.mkdir(parents=True, exist_ok=True)
    figure.savefig(RESULTS / "logprob_memory.png", dpi=120)


def read_arguments(arguments: list[str] | None, work: Callable[[str, Case], Any]) -> bool | None:
    """Return whether to run the quick version; ``None`` in a process that :func:`measure` started, which is done."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="small sizes, one pair, no curves: does it run?")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        answer(options.worker, work)
        return None
    return bool(options.quick)


def sizes(quick: bool) -> tuple[int, int, int]:
    """Return vocabulary, tokens of a full sequence, and pairs."""
    return (4_096, 64, 1) if quick else (32_768, 512, 3)


def main(arguments: list[str] | None = None) -> None:
    """Measure all cases, one process after another, and report."""
    quick = read_arguments(arguments, work)
    if quick is None:
        return
    vocabulary, width, pairs = sizes(quick)
    short = int(0.31 * width) + 1
    shapes = {
        f"8 x {width}": Case(vocabulary=vocabulary, lengths=(width,) * 8),
        f"one of {width}, seven of {short}": Case(vocabulary=vocabulary, lengths=(width, *[short] * 7), prompt=16),
        f"8 x {width}, half of it prompt": Case(vocabulary=vocabulary, lengths=(width,) * 8, prompt=width // 2),
    }
    goals = ((None, None),) * 3 if quick else ((MEMORY_GOAL, TIME_GOAL), (None, RAGGED_GOAL), (None, None))
    rows = []
    for (shape, case), (memory, seconds) in zip(shapes.items(), goals, strict=True):
        results, claim = compare(case, pairs), f"V={vocabulary}, {shape}"
        rows += [memory_row(claim, results, memory), time_row(claim, results, seconds)]
    rows += kept_rows(quick)
    if not quick:
        rows += large_rows()
        curves()
    finish("logprob_memory", rows)


if __name__ == "__main__":
    main()
