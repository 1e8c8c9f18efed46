"""``torchrl-moe doctor``: what is installed, whether it works together, and whether a model can be replayed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any

from torchrl_moe import __version__
from torchrl_moe.cli.command import BAD_USE, FINE, PROBLEM, BadUse, Command, Output, note
from torchrl_moe.cli.engines import ENGINES, add_engine_arguments, started
from torchrl_moe.cli.explain import explain
from torchrl_moe.cli.machine import GB, Machine
from torchrl_moe.cli.models import MODEL_HELP, config_of, model_folder, try_replay
from torchrl_moe.cli.packages import EXTRAS, Package, installed_packages

if TYPE_CHECKING:
    from torchrl_moe.modules import AsyncVLLM

__all__ = ["COMMAND", "Problem"]

LEAST_SHARED = 0.5 * GB
LEAST_DISK = 2 * GB
LEAST_MEMORY = 2 * GB
"""Bytes: below these, an engine or a weight update of even a small model fails."""
QUESTION = [1, 2, 3, 4, 5]
ANSWER_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong, and what to do about it."""

    what: str
    mend: str

    def __str__(self) -> str:
        return f"- {self.what}\n  {self.mend}"


@dataclass(slots=True)
class _Seen:
    """What was looked at, part by part: tables for people, plain data for ``--json``."""

    tables: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--engine",
        nargs="?",
        const=ENGINES[0],
        metavar="{" + ",".join(ENGINES) + "}",
        help="start an engine with MODEL, and check whether it returns routes (without a value: vllm)",
    )
    add_engine_arguments(parser, "bfloat16")


def _run(options: argparse.Namespace, output: Output) -> int:
    if options.engine is not None and options.engine not in ENGINES:
        if options.model is not None:
            raise BadUse(f"--engine {options.engine}: must be one of {', '.join(ENGINES)}")
        # `--engine MODEL`: argparse reads the word behind the option as its value
        options.model, options.engine = options.engine, ENGINES[0]
    if options.engine and options.model is None:
        raise BadUse(f"--engine {options.engine} needs a MODEL to start it with: {MODEL_HELP}")
    seen = _Seen()
    _look_at_packages(seen)
    _look_at_machine(seen)
    if options.model is not None:  # '' is a variable that was not set: refused, not passed over
        try:
            _look_at_model(seen, options)
        except Exception as error:  # what was seen so far is shown all the same
            line, code = explain(error)
            if code == BAD_USE or options.traceback:
                raise
            seen.problems.append(Problem(f"{options.model}: {line}", "torchrl-moe doctor --traceback shows the rest"))
    verdict = "no problem was found" if not seen.problems else f"problems: {len(seen.problems)}"
    seen.tables.append("\n".join([verdict, *map(str, seen.problems)]))
    seen.data["problems"] = [asdict(one) for one in seen.problems]
    output.show("\n\n".join(seen.tables), {"ok": not seen.problems, **seen.data})
    return PROBLEM if seen.problems else FINE


# -- packages and the machine -----------------------------------------------------------------------------------------


def _look_at_packages(seen: _Seen) -> None:
    from torchrl_moe.render.text_tables import plain_table

    try:
        packages = installed_packages()
    except metadata.PackageNotFoundError:
        packages = []
        seen.problems.append(
            Problem("torchrl_moe is imported from a folder and is not installed", "pip install -e . in its checkout")
        )
    rows = [_row(one) for one in packages]
    header = ["package", "installed", "works with", "tested with", "for"]
    seen.tables.append(plain_table(f"torchrl_moe {__version__}", header, rows, wide=header))
    seen.data |= {"torchrl_moe": __version__, "packages": [asdict(one) for one in packages]}
    seen.problems += [Problem(one.problem, one.mend) for one in packages if one.problem]
    seen.problems += _mixed_builds()


def _row(one: Package) -> list[str]:
    wanted = one.needed or "any"
    use = f"[{one.extra}] {EXTRAS[one.extra]}" if one.extra else ""
    return [one.name, one.installed or "not installed", wanted, one.tested, use]


def _mixed_builds() -> Iterator[Problem]:
    """Yield builds for CUDA beside a torch for CPUs: transformers imports them, and fails."""

    def version(name: str) -> str:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return ""

    if not version("torch").endswith("+cpu"):
        return
    for name in ("torchvision", "torchaudio"):
        other = version(name)
        if other and not other.endswith("+cpu"):
            yield Problem(
                f"{name} {other} is a build for CUDA beside torch {version('torch')}: importing transformers may fail",
                f"pip uninstall {name}: text models do not need it",
            )


def _look_at_machine(seen: _Seen) -> None:
    from torchrl_moe.render.text_tables import plain_table

    machine = Machine.look()
    seen.tables.append(plain_table("machine", ["what", "there is"], machine.rows, wide=["what", "there is"]))
    seen.data["machine"] = asdict(machine)
    if machine.free_memory < LEAST_MEMORY:
        seen.problems.append(
            Problem(
                f"{machine.free_memory / GB:.1f} GB of memory are free, and a replica takes 2 GB besides its model",
                "end other processes, or use a larger machine",
            )
        )
    for place in machine.places:
        least = LEAST_SHARED if place.path == "/dev/shm" else LEAST_DISK
        if place.free < least:
            other = "TMPDIR names another place" if place.path != "/dev/shm" else "docker run --shm-size=8g gives more"
            seen.problems.append(
                Problem(f"{place.free / GB:.1f} GB are free on {place.path} ({place.use})", f"make room there; {other}")
            )


# -- the model --------------------------------------------------------------------------------------------------------


def _look_at_model(seen: _Seen, options: argparse.Namespace) -> None:
    from torchrl_moe.render.text_tables import plain_table

    rows: list[list[str]] = []
    found: dict[str, Any] = {"name": options.model}
    with model_folder(options.model) as folder:
        note(f"reading {options.model} ...")
        config = config_of(folder)
        text = config.get_text_config()
        kind = ", ".join(config.architectures or ()) or config.model_type
        rows.append(["architecture", f"{kind}, {text.num_hidden_layers} layers"])
        found |= {"architecture": kind, "layers": int(text.num_hidden_layers)}
        verdict = try_replay(config)
        said = {
            True: f"yes: {verdict.routers}",
            False: f"no: {verdict.why}",
            None: f"not known: {verdict.why}; torchrl-moe probe tries it with its weights",
        }
        rows.append(["can be replayed", said[verdict.answer]])
        found |= {"replayable": verdict.answer, "why": verdict.why, "routers": verdict.routers}
        seen.problems += _of_replay(options.model, verdict.answer, verdict.why)
        if options.engine:
            with started(folder, config, options.engine, options.dtype, options.engine_args) as engine:
                _look_at_engine(engine, options.engine, rows, found, seen.problems)
        else:
            rows.append(["engine", "not tried: --engine starts one"])
    seen.tables.append(plain_table(options.model, ["question", "answer"], rows, wide=["question", "answer"]))
    seen.data["model"] = found


def _of_replay(name: str, answer: bool | None, why: str) -> Iterator[Problem]:
    if answer is False and "dense model" in why:
        yield Problem(f"{name} has no experts: there is nothing to replay", "train it with replay='none'")
    elif answer is False:
        yield Problem(f"{name} cannot be replayed: {why}", "train it with replay='none', or use another model")


def _look_at_engine(
    engine: AsyncVLLM, kind: str, rows: list[list[str]], found: dict[str, Any], problems: list[Problem]
) -> None:
    """Ask an engine for a short answer, and look at its routes and log-probs."""
    info, layout = engine.infos[0], engine.routing_layout
    answer: Any = engine.generate(
        prompt_token_ids=QUESTION, sampling_params={"max_tokens": ANSWER_TOKENS, "logprobs": 0}, use_tqdm=False
    )
    output = answer.outputs[0]
    routes = output.routed_experts
    shape = None if routes is None else list(routes.shape)
    follows = "yes" if not info.why_live else f"no: {info.why_live}"
    rows += [
        ["engine", f"{kind} {info.engine_version.removeprefix(kind).strip()}, {info.dtype}"],
        ["returns routes", "no" if shape is None else f"yes: {shape[0]} rows, {shape[1]} layers, {shape[2]} experts"],
        ["returns log-probs", "no" if output.logprobs is None else "yes"],
        ["follows recorded experts", follows],
    ]
    found["engine"] = {
        "kind": kind,
        "version": info.engine_version,
        "dtype": info.dtype,
        "routes": shape,
        "log_probs": output.logprobs is not None,
        "follows": not info.why_live,
    }
    wanted = len(QUESTION) + len(output.token_ids) - 1
    if found["replayable"] is not False and (shape is None or layout is None):
        problems.append(
            Problem(f"{kind} returned no routes", "leave enable_return_routed_experts out, or set it to true")
        )
    elif shape is not None and shape[0] != wanted:
        problems.append(
            Problem(
                f"{kind} returned {shape[0]} rows of routes, not {wanted}: one for each token but the last",
                "torchrl-moe conformance says which checks its routes do not pass",
            )
        )
    if output.logprobs is None:
        problems.append(Problem(f"{kind} returned no log-probs", "ask for them: sampling_params={'logprobs': 0}"))


COMMAND = Command(
    name="doctor",
    help="what is installed, whether it works together, whether a model can be replayed",
    description="Checks packages, machine and model, and says what to do about each problem. Weights are loaded only "
    "with --engine.",
    examples=[
        ("torchrl-moe doctor", "packages and machine"),
        ("torchrl-moe doctor Qwen/Qwen3-30B-A3B", "and whether this model's routers can be replayed"),
        ("torchrl-moe doctor tiny --engine", "and whether vLLM starts and returns routes"),
        ("torchrl-moe doctor --json", "for scripts"),
    ],
    add_arguments=_add_arguments,
    run=_run,
)
