"""Running services, seen from outside: those in a Ray cluster, by name; others, by what their drivers export.

A service with ``backend="local"`` lives in its driver, and no other process can talk to its replicas. From outside one
can only tell that it is there, and how to see more.
"""

from __future__ import annotations

import http.client
import os
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

from torchrl_moe.cli.command import BadUse
from torchrl_moe.cli.explain import missing_extra

__all__ = ["Exported", "LocalDriver", "Service", "connected", "local_drivers"]

TITLE = "torchrl_moe::"
MODULES = "torchrl_moe.modules.backends."
PREFIX = "torchrl_moe_replica_"
FETCH_SECONDS = 10.0


class Service(Protocol):
    """What a table is made of."""

    def stats(self) -> list[dict[str, Any]]:
        """Return a row for each replica; see ``GenerationService.stats``."""


# -- services in Ray --------------------------------------------------------------------------------------------------


@contextmanager
def connected(name: str | None, namespace: str | None) -> Iterator[tuple[str, Service]]:
    """Join a service of the Ray cluster, and leave it again.

    Args:
        name: as its maker named it; ``None``: the only one that runs.
        namespace: as its maker gave it.

    Raises:
        BadUse: Ray is not installed, no cluster is found, or no such service runs; the message names what does.
    """
    if find_spec("ray") is None:
        raise BadUse(f"services with a name run in Ray: top {missing_extra('ray')}. {_where_else()}")
    from torchrl_moe._errors import EngineError
    from torchrl_moe.modules import AsyncVLLM

    try:
        name = name or _only(namespace)
        engine = AsyncVLLM.connect(name, namespace=namespace)
    except EngineError as error:
        raise BadUse(f"{str(error).splitlines()[0]} {_where_else()}") from error
    with engine:
        yield name, engine


def _only(namespace: str | None) -> str:
    from torchrl_moe.modules.backends.ray.cluster import join_cluster, running_services
    from torchrl_moe.modules.backends.ray.ray_service import NAMESPACE

    join_cluster(start=False)
    names = list(running_services(namespace or NAMESPACE))
    if len(names) != 1:
        listed = f"several services run: {', '.join(names)}" if names else "no service runs in the Ray cluster"
        mend = "name one" if names else "AsyncVLLM.launch(..., backend='ray', name='...') starts one"
        raise BadUse(f"{listed}; {mend}. {_where_else()}")
    return names[0]


# -- services that live in their drivers ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LocalDriver:
    """A process on this machine whose replicas are its children: its id, its command line, how many engines it has."""

    pid: int
    command: str
    replicas: int


def local_drivers() -> list[LocalDriver]:
    """Return the processes of this machine that have replicas of their own, other users' as far as they can be seen."""
    import psutil

    engines: dict[int, int] = {}
    for process in psutil.process_iter(["pid", "ppid", "name", "cmdline"]):
        driver = _driver_of(process.info)
        if driver is not None and driver != os.getpid():
            engines[driver] = engines.get(driver, 0) + 1
    found = []
    for pid, replicas in sorted(engines.items()):
        try:
            command = " ".join(psutil.Process(pid).cmdline())
        except psutil.Error:  # it has just ended
            continue
        if MODULES + "ray" not in command and not command.startswith("ray::"):
            found.append(LocalDriver(pid, command, replicas))
    return found


def _driver_of(info: Mapping[str, Any]) -> int | None:
    """Return the driver of an engine's process; ``None`` if it is no engine's, or its driver is gone."""
    import psutil

    words: Sequence[str] = info["cmdline"] or ()
    line = " ".join(words)
    if line.startswith(f"{TITLE}Replica"):  # forked: its parent is the server that forks for the driver
        try:
            return int(psutil.Process(info["ppid"]).ppid())
        except psutil.Error:
            return None
    if "-m" in words and any(word.startswith(MODULES) and word.endswith(".engine_process") for word in words):
        return int(info["ppid"])
    return None


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
    """A service by the metrics that its driver exports over HTTP, in Prometheus' format.

    Args:
        url: of the metrics, such as ``http://localhost:9000/metrics``.
    """

    def __init__(self, url: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise BadUse(f"--url {url}: it begins with http:// or https://, such as http://localhost:9000/metrics")
        self.url = url

    def stats(self) -> list[dict[str, Any]]:
        """Fetch the metrics; see :class:`Service`.

        Raises:
            BadUse: nothing answers there, or what does has no replicas.
        """
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

    from torchrl_moe.modules.serving.metrics_table import OF_THE_ENGINE, OF_THE_TABLE

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
