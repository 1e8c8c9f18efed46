"""``torchrl-moe top``: the replicas of a running service, as a table that is redrawn."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from importlib.util import find_spec
from typing import Any

from torchrl_moe.cli.command import FINE, PROBLEM, BadUse, Command, Output, note
from torchrl_moe.cli.services import Exported, Service, connected

__all__ = ["COMMAND", "table"]

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

Show = Callable[[str, dict[str, Any]], None]


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
    with _service(options) as (name, service):
        if options.once:
            rows = service.stats()
            output.show(table(name, rows), _plain(name, rows))
            return PROBLEM if any(row.get("state") in BAD for row in rows) else FINE
        with contextlib.suppress(KeyboardInterrupt), _screen(output) as show:  # Ctrl-C is how it ends
            while True:
                rows = service.stats()
                text = f"{table(name, rows)}\n{datetime.now():%H:%M:%S}, Ctrl-C ends"
                show(text, _plain(name, rows))
                time.sleep(options.interval)
    return FINE


@contextlib.contextmanager
def _service(options: argparse.Namespace) -> Iterator[tuple[str, Service]]:
    if options.url is not None:
        yield options.url, Exported(options.url)
        return
    note("looking for the service in the Ray cluster ...")
    with connected(options.name, options.namespace) as found:
        yield found


@contextlib.contextmanager
def _screen(output: Output) -> Iterator[Show]:
    """Yield a function that shows a text: on a terminal with rich in place of the previous text, else below it."""
    if find_spec("rich") is None or output.is_json or not output.stream.isatty():
        yield lambda text, data: output.show(text, data, indent=None)
        return
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False) as live:
        yield lambda text, _: live.update(Text(text, no_wrap=True), refresh=True)


def table(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each replica, and one for all.

    >>> print(table("mine", [{"replica": 0, "state": "SERVING", "version": 3, "tokens_per_second": 1200.0}]))
    mine: 1 of 1 serving, 1,200 tokens/s
    replica  state    version  tokens/s
         #0  SERVING        3     1,200
    """
    from torchrl_moe.render.text_tables import plain_table

    keys = [key for key in COLUMNS if any(row.get(key) not in (None, "") for row in rows)]
    header = [COLUMNS[key][0] for key in keys]
    cells = [[_cell(key, row.get(key)) for key in keys] for row in rows]
    serving = sum(row.get("state") == "SERVING" for row in rows)
    speed = sum(row.get("tokens_per_second") or 0.0 for row in rows)
    summary = f"{title}: {serving} of {len(rows)} serving, {speed:,.0f} tokens/s"
    return plain_table(summary, header, cells, wide=("state", "last error"))


def _cell(key: str, value: Any) -> str:
    if value is None or value == "":
        return ""
    if key == "last_error":
        from torchrl_moe.render.text_tables import one_line

        return one_line(str(value).partition("\n")[0], ERROR_CHARACTERS)
    return COLUMNS[key][1].format(value)


def _plain(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"service": name, "time": time.time(), "replicas": [dict(row) for row in rows]}


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
