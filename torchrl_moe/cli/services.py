"""Running services, seen from outside: those in a Ray cluster, by name; others, by what their drivers export.

A service with ``backend="local"`` lives in its driver, and no other process can talk to its replicas. From outside one
can only tell that it is there, and how to see more.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from torchrl_moe.cli.command import FINE, PROBLEM, BadUse, Command, Output, note
from torchrl_moe.cli.models import missing_extra

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from torchrl_moe.modules import AsyncVLLM

TITLE = "torchrl_moe::"
MODULES = "torchrl_moe.modules.backends."
PREFIX = "torchrl_moe_replica_"
FETCH_SECONDS = 10.0


class Service(Protocol):
    """What a table is made of."""

    def stats(self) -> list[dict[str, Any]]:
        """Return a row for each replica; see ``GenerationService.stats``."""


# -- services in Ray
@contextmanager
def connected(name: str | None, namespace: str | None) -> Iterator[tuple[str, Service]]:
    """Join a service of the Ray cluster, the only one without a name, and leave it again."""
    if find_spec("ray") is None:
        raise BadUse(f"services with a name run in Ray: top {missing_extra('ray')}. {_where_else()}")
    from torchrl_moe.errors import EngineError
    from torchrl_moe.modules import AsyncVLLM

    try:
        if not name:
            from torchrl_moe.modules.backends.ray.cluster import NAMESPACE, join_cluster, running_services

            join_cluster(start=False)
            names = list(running_services(namespace or NAMESPACE))
            if not names:
                mend = "AsyncVLLM.launch(..., backend='ray', name='...') starts one"
                raise BadUse(f"no service runs in the Ray cluster; {mend}. {_where_else()}")
            if len(names) > 1:
                raise BadUse(f"several services run: {', '.join(names)}; name one. {_where_else()}")
            name = names[0]
        engine = AsyncVLLM.connect(name, namespace=namespace)
    except EngineError as error:
        raise BadUse(f"{str(error).splitlines()[0]} {_where_else()}") from error
    with engine:
        yield name, engine


# -- services that live in their drivers
@dataclass(frozen=True, slots=True)
class LocalDriver:
    """A process on this machine whose replicas are its children: its id, its command line, how many engines it has."""

    pid: int
    command: str
    replicas: int


def local_drivers() -> list[LocalDriver]:
    """Return the processes of this machine that have replicas of their own, other users' as far as they can be seen."""
    import psutil

    # count engine processes by the process that they belong to
    engines: Counter[int] = Counter()
    for process in psutil.process_iter(["pid", "ppid", "name", "cmdline"]):
        # by its command line: an engine process has a title of its own, or runs our module
        command, driver = process.info["cmdline"] or (), int(process.info["ppid"] or 0)
        with contextlib.suppress(psutil.Error):  # its driver is gone
            if " ".join(command).startswith(f"{TITLE}Replica"):  # forked by a server that forks for the driver
                engines[int(psutil.Process(driver).ppid())] += 1
            elif "-m" in command and any(
                one.startswith(MODULES) and one.endswith(".engine_process") for one in command
            ):
                engines[driver] += 1
    found = []
    for pid, replicas in sorted(engines.items()):
        with contextlib.suppress(psutil.Error):  # it has just ended
            line = " ".join(psutil.Process(pid).cmdline())
            if pid != os.getpid() and MODULES + "ray" not in line and not line.startswith("ray::"):
                found.append(LocalDriver(pid, line, replicas))
    return found


def _where_else() -> str:
    """Return how to see services that are in no Ray cluster, with those of this machine."""
    seen = "".join(
        f"On this machine process {one.pid} ({one.command[:60]}) has {one.replicas} replica(s). "
        for one in local_drivers()
    )
    return (
        f"{seen}A service with backend='local' is in no cluster: give --url, the address of the metrics that its "
        "driver exports (engine.register_prometheus); in the driver itself print(engine) shows the table."
    )


# -- what a driver exports --------------------------------------------------------------------------------------------


class Exported:
    """A service by the metrics that its driver exports over HTTP, in Prometheus' format."""

    def __init__(self, url: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise BadUse(f"--url {url}: it begins with http:// or https://, such as http://localhost:9000/metrics")
        self.url = url

    def stats(self) -> list[dict[str, Any]]:
        """Fetch the metrics; see :class:`Service`."""
        try:
            with urllib.request.urlopen(self.url, timeout=FETCH_SECONDS) as answer:
                text = answer.read().decode()
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = str(getattr(error, "reason", error)).strip()
            raise BadUse(f"--url {self.url}: nothing answers there ({reason}): is the driver running?") from error
        rows = exported_rows(text)
        if not rows:
            raise BadUse(f"--url {self.url}: there are no replicas in it: export them with engine.register_prometheus")
        return rows


def exported_rows(text: str) -> list[dict[str, Any]]:
    """Return a row for each replica of a text in Prometheus' format, with the keys of ``stats()``."""
    from prometheus_client.parser import text_string_to_metric_families

    from torchrl_moe.modules.serving.stats import OF_THE_ENGINE, OF_THE_TABLE

    # exported names back to the keys of stats(), replica by replica
    names = {f"{PREFIX}{one.exported}": one for one in (*OF_THE_TABLE, *OF_THE_ENGINE) if one.exported}
    rows: dict[int, dict[str, Any]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            replica = sample.labels.get("replica", "")
            if not replica.isdigit():
                continue
            row = rows.setdefault(int(replica), {"replica": int(replica)})
            name = sample.name.removesuffix("_total")
            if name == f"{PREFIX}state":
                if sample.value:
                    row["state"] = sample.labels["state"].upper()
            elif name in names:
                row[names[name].name] = sample.value
    for row in rows.values():
        queries = row.get("cache_queries", 0.0)
        row["hit_rate"] = row.get("cache_hits", 0.0) / queries if queries else 0.0
    return [rows[index] for index in sorted(rows)]


# ``torchrl-moe top``: the replicas of a running service, as a table that is redrawn.
COLUMNS: Mapping[str, tuple[str, str]] = {
    "replica": ("replica", "#{:.0f}"),
    "state": ("state", "{}"),
    "version": ("version", "{:.0f}"),
    "inflight": ("in flight", "{:.0f}"),
    "running": ("running", "{:.0f}"),
    "waiting": ("queued", "{:.0f}"),
    "cache_usage": ("KV use", "{:.0%}"),
    "hit_rate": ("prefix hits", "{:.0%}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "requests": ("requests", "{:,.0f}"),
    "restarts": ("restarts", "{:.0f}"),
    "last_error": ("last error", "{}"),
}
"""Key of ``stats()`` -> name of the column, and how a value is written."""
ERROR_CHARACTERS = 60
LONGEST_INTERVAL = 86400
"""Seconds."""
BAD = {"DEAD", "QUARANTINED"}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="name of a service in Ray (default: the only one)")
    parser.add_argument("--namespace", help="Ray namespace of the service (default: torchrl_moe)")
    parser.add_argument("--url", help="address of the metrics that a driver exports, for a service that is not in Ray")
    parser.add_argument("--once", action="store_true", help="print one table and exit")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between tables (default: 1)")


def _run(options: argparse.Namespace, output: Output) -> int:
    if not 0 < options.interval <= LONGEST_INTERVAL:
        raise BadUse(
            f"--interval {options.interval:g}: it must be above 0 seconds and at most a day, {LONGEST_INTERVAL}"
        )
    if options.url is not None and options.name is not None:
        raise BadUse("give NAME, for a service in Ray, or --url, for a service that exports metrics, not both")
    with contextlib.ExitStack() as stack:
        service: Service
        if options.url is not None:
            name, service = options.url, Exported(options.url)
        else:
            note("looking for the service in the Ray cluster ...")
            name, service = stack.enter_context(connected(options.name, options.namespace))

        def look() -> tuple[str, dict[str, object], bool]:
            """Return the table, the same as data, and whether a replica is dead."""
            rows = service.stats()
            data: dict[str, object] = {"service": name, "time": time.time(), "replicas": [dict(row) for row in rows]}
            return table(name, rows), data, any(row.get("state") in BAD for row in rows)

        if options.once:
            text, data, is_bad = look()
            output.show(text, data)
            return PROBLEM if is_bad else FINE
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is how it ends
            live = None
            # on a terminal with rich each table takes the place of the one before
            if find_spec("rich") is not None and not output.is_json and output.stream.isatty():
                from rich.live import Live
                from rich.text import Text

                live = stack.enter_context(Live(auto_refresh=False))
            while True:
                text, data, _ = look()
                text = f"{text}\n{datetime.now():%H:%M:%S}, Ctrl-C ends"
                if live is None:
                    output.show(text, data, indent=None)
                else:
                    live.update(Text(text, no_wrap=True), refresh=True)
                time.sleep(options.interval)
    return FINE


def table(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each replica, and one for all.

    >>> print(table("mine", [{"replica": 0, "state": "SERVING", "version": 3, "tokens_per_second": 1200.0}]))
    mine: 1 of 1 serving, 1,200 tokens/s
    replica  state    version  tokens/s
         #0  SERVING        3     1,200
    """
    from torchrl_moe.render.tables import one_line, plain_table

    keys = [key for key in COLUMNS if any(row.get(key) not in (None, "") for row in rows)]
    cells: list[list[str]] = []
    for row in rows:
        cells.append([])
        for key in keys:
            value = row.get(key)
            if key == "last_error" and value:
                value = one_line(str(value).partition("\n")[0], ERROR_CHARACTERS)
            cells[-1].append("" if value is None or value == "" else COLUMNS[key][1].format(value))
    serving = sum(row.get("state") == "SERVING" for row in rows)
    speed = sum(row.get("tokens_per_second") or 0.0 for row in rows)
    summary = f"{title}: {serving} of {len(rows)} serving, {speed:,.0f} tokens/s"
    return plain_table(summary, [COLUMNS[key][0] for key in keys], cells, wide=("state", "last error"))


COMMAND = Command(
    name="top",
    help="a live table of a running service",
    description="Shows the replicas of a service: state, version of the weights, requests, cache, tokens/s. A service "
    "in Ray is found by its name, a service with backend='local' by the metrics that its driver exports.",
    examples=[
        ("torchrl-moe top", "the only service in the Ray cluster"),
        ("torchrl-moe top policy --interval 5", "the service named policy, every 5 seconds"),
        ("torchrl-moe top --url http://localhost:9000/metrics", "a service whose driver exports metrics"),
        ("torchrl-moe top policy --once --json", "for scripts; exit code 1 if a replica is dead"),
    ],
    add_arguments=_add_arguments,
    run=_run,
    after_interrupt="the service keeps running",
)


# Engines that a command starts for itself: small, with one replica; they end with the command.
ENGINES = ("vllm", "transformers")
DTYPES = ("bfloat16", "float32", "float16")
MOST_TOKENS = 2048


def add_engine_arguments(parser: argparse.ArgumentParser, dtype: str) -> None:
    """Add the options of every command that starts an engine."""
    parser.add_argument(
        "--dtype", choices=DTYPES, default=dtype, help=f"dtype of an engine that is started (default: {dtype})"
    )
    add_engine_arg(parser)


def add_engine_arg(parser: argparse.ArgumentParser) -> None:
    """Add the option for any other argument of an engine."""
    parser.add_argument(
        "--engine-arg",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="engine_args",
        help="an argument of the engine, with its value as JSON or text; may be given several times",
    )


def engine_arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """Return engine arguments of ``KEY=VALUE``.

    >>> engine_arguments(["tensor_parallel_size=2", "load_format=dummy"])
    {'tensor_parallel_size': 2, 'load_format': 'dummy'}
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise BadUse(f"--engine-arg {pair}: write it as KEY=VALUE, such as tensor_parallel_size=2")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def check_engine(kind: str, given: Sequence[str]) -> None:
    """Refuse an engine that is not installed, or arguments that it does not have, before anything is loaded."""
    arguments = engine_arguments(given)
    if "model" in arguments:
        raise BadUse(f"--engine-arg model={arguments['model']}: the model is the first argument, MODEL")
    check_installed(kind, "--engine transformers")
    from torchrl_moe.modules.backends.engine_kind import engine_kind

    engine_kind(kind).arguments_of({"model": "?", **arguments})


def check_installed(kind: str, instead: str) -> None:
    """Refuse an engine that is not installed; ``instead`` is the option that chooses the other engine."""
    if kind == "vllm" and find_spec("vllm") is None:
        raise BadUse(
            "vLLM is not installed: pip install 'torchrl_moe[vllm]' (a CPU needs its own build, see docs/install.md), "
            f"or use {instead}"
        )


@contextlib.contextmanager
def started(folder: str, config: PreTrainedConfig, kind: str, dtype: str, given: Sequence[str]) -> Iterator[AsyncVLLM]:
    """Start an engine of a model; it ends with the context."""
    arguments = engine_arguments(given)
    check_installed(kind, "--engine transformers")
    from torchrl_moe.modules import AsyncVLLM

    longest = int(getattr(config.get_text_config(), "max_position_embeddings", MOST_TOKENS) or MOST_TOKENS)
    defaults: dict[str, object] = {"dtype": dtype, "max_model_len": min(longest, MOST_TOKENS)}
    if kind == "vllm":
        defaults["enforce_eager"] = True  # on a GPU, too: it starts sooner
    note(f"starting {kind} ...")
    with AsyncVLLM.from_pretrained(folder, engine=kind, **{**defaults, **arguments}) as engine:
        yield engine
