"""What 8, 64 and 512 GPUs would do, by calculation and simulation: which part of a step is the bottleneck.

Qwen3-30B-A3B; a quarter of the GPUs train, the others generate. Costs of GPUs and network are assumptions (below);
the driver's cost is measured in this run; the schedule is the collector's own, in an event simulation. No GPU was used.
With weak scaling a batch has as many answers as are generated at a time, with strong scaling always 1024.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from benchmarks.async_collection import GROUP, Simulation, in_turns
from benchmarks.collector_overhead import cost, environment, ready_answers
from benchmarks.report import Row, finish
from torchrl_moe.collectors import AsyncLLMCollector
from torchrl_moe.collectors.schedule import Schedule
from torchrl_moe.modules import vLLMWrapper
from torchrl_moe.trainers.config import ModelConfig
from torchrl_moe.trainers.plan import ModelSizes, model_config_of

GPUS = (8, 64, 512)
STRONG_ANSWERS = 1024
STALENESS, STEPS = 2, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """An H100 and its network (vendor specification), and the achieved shares of them (guesses)."""

    flops: float = 989e12  # bf16, dense
    memory_bandwidth: float = 3.35e12  # bytes per second
    network: float = 50e9  # bytes per second of a host's link for this traffic: 400 Gb/s
    training_share: float = 0.15  # of flops, for an MoE with small experts
    decoding_share: float = 0.5  # of the memory bandwidth
    training_gpus: float = 0.25  # of all
    tensor_parallel: int = 2  # GPUs per replica
    slots: int = 128  # answers that a replica generates at a time
    tokens: int = 4096  # of the mean answer; lengths are log-normal
    sigma: float = 0.8
    cap: float = 4.0  # the longest, in mean answers


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds of a step's parts, each as if it were the only one."""

    replicas: int
    answers: int
    answer: float
    train: float
    sync: float

    @classmethod
    def of(cls, gpus: int, answers: int, sizes: ModelSizes, given: Assumptions) -> Step:
        """Compute a step on a given number of GPUs."""
        replicas = replicas_of(gpus, given)
        cached = given.slots * given.tokens / 2 * sizes.kv * 2  # answers are half done on average
        read = (2 * sizes.parameters + cached) / given.tensor_parallel
        token = read / (given.memory_bandwidth * given.decoding_share)
        # embeddings are looked up, the head is a product
        active = sizes.parameters - sizes.outside // 2 - sizes.experts * (1 - sizes.top_k / sizes.num_experts)
        work = answers * given.tokens * 6 * active * 4 / 3  # activation checkpointing
        weights = 2 * sizes.parameters / given.network
        return cls(
            replicas,
            answers,
            answer=token * given.tokens,
            train=work / (gpus * given.training_gpus * given.flops * given.training_share),
            sync=replicas * weights,
        )


def replicas_of(gpus: int, given: Assumptions) -> int:
    """Return the number of replicas on the GPUs that do not train."""
    return int(gpus * (1 - given.training_gpus)) // given.tensor_parallel


def measured_driver(tokens: int) -> float:
    """Seconds of the driver's CPU for an answer, from prompt to row, with the routes of 48 layers."""
    with ready_answers() as engine:
        policy = vLLMWrapper(engine, generate_kwargs={"max_new_tokens": tokens})
        collector = AsyncLLMCollector(environment(GROUP), policy=policy, dialog_turns_per_batch=64, max_staleness=1)
        batches = iter(collector)
        list(islice(batches, 1))
        spent = cost(batches, 64)
        collector.shutdown()
    return spent / 1e3


def seconds_of_a_step(step: Step, given: Assumptions) -> tuple[float, float, float]:
    """Return the seconds of a synchronous and of an asynchronous step, and the trainer's idle share in the latter."""
    groups = step.answers // GROUP
    slots = step.replicas * given.slots
    unit = step.answer  # the simulation counts in mean answers
    turns = in_turns(given.sigma, given.cap, slots, step.train / unit, 10, groups, step.sync / unit)
    run = Simulation(
        Schedule(groups, STALENESS, "window"), given.sigma, given.cap, slots, step.train / unit, step.sync / unit
    )
    return turns * unit, run.run(STEPS) * unit, run.idle


def bound(parts: dict[str, float]) -> str:
    """Return the name of the slowest part."""
    return max(parts, key=lambda name: parts[name])


def row_of(gpus: int, kind: str, answers: int, sizes: ModelSizes, given: Assumptions, driver: float) -> Row:
    """Return the row of a step on a given number of GPUs."""
    step = Step.of(gpus, answers, sizes, given)
    generate = step.answers * step.answer / (step.replicas * given.slots)
    longest = given.cap * step.answer / (STALENESS + 1)  # an answer may last S + 1 steps
    alone = {
        "rollouts": generate,
        "the longest answer": longest,
        "training": step.train,
        "one driver": step.answers * driver,
    }
    turns, at_once, idle = seconds_of_a_step(step, given)
    at_once = max(at_once, alone["one driver"])
    seconds = {**alone, "weight sync": step.sync}
    parts = ", ".join(f"{name} {value:.0f}" for name, value in seconds.items())
    value = f"{turns:.0f} s sync, {at_once:.0f} s async ({idle:.0%} idle); alone: {parts}; bound: {bound(seconds)}"
    return Row(claim=f"{gpus} GPUs, {kind}, {step.answers} answers", value=value)


def main() -> None:
    """All sizes, weak and strong scaling."""
    given = Assumptions()
    sizes = ModelSizes.of(model_config_of("Qwen/Qwen3-30B-A3B"), ModelConfig())
    driver = measured_driver(given.tokens)
    rows = [Row(claim=f"driver, CPU per answer of {given.tokens} tokens (measured)", value=f"{driver * 1e3:.1f} ms")]
    for gpus in GPUS:
        slots = replicas_of(gpus, given) * given.slots
        rows.append(row_of(gpus, "weak", slots, sizes, given, driver))
        rows.append(row_of(gpus, "strong", STRONG_ANSWERS, sizes, given, driver))
    finish("scale", rows)


if __name__ == "__main__":
    main()
