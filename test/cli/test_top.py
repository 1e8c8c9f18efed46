"""``torchrl-moe top``: tables of services, once or again and again."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from torchrl_moe.cli import services as top
from torchrl_moe.cli.main import main
from torchrl_moe.cli.services import Exported, table
from torchrl_moe.modules import AsyncVLLM

ROW = {"replica": 0, "state": "SERVING", "version": 3, "cache_usage": 0.25, "tokens_per_second": 1200.0}
URL = ["top", "--url", "http://localhost:9000/metrics"]


def exporting(monkeypatch: pytest.MonkeyPatch, *answers: list[dict[str, Any]]) -> None:
    """Have ``--url`` give these rows, one after the other, then a Ctrl-C."""
    left = list(answers)

    def stats(self: Exported) -> list[dict[str, Any]]:
        if not left:
            raise KeyboardInterrupt
        return left.pop(0)

    monkeypatch.setattr(Exported, "stats", stats)


def test_a_line_for_each_replica() -> None:
    dead = {"replica": 1, "state": "DEAD", "version": 2, "last_error": "killed\nits log " + "x" * 99}
    lines = table("mine", [{**ROW, "last_error": None}, dead]).splitlines()
    assert lines[0] == "mine: 1 of 2 serving, 1,200 tokens/s"
    assert lines[1].split() == ["replica", "state", "version", "KV", "use", "tokens/s", "last", "error"]
    assert lines[2].split() == ["#0", "SERVING", "3", "25%", "1,200"]
    assert lines[3].split() == ["#1", "DEAD", "2", "killed"]


def test_once_is_a_table_and_a_dead_replica_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exporting(monkeypatch, [ROW], [{**ROW, "state": "DEAD"}])
    assert main([*URL, "--once"]) == 0
    assert capsys.readouterr().out == table("http://localhost:9000/metrics", [ROW]) + "\n"
    assert main([*URL, "--once", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["service"], found["replicas"]) == ("http://localhost:9000/metrics", [{**ROW, "state": "DEAD"}])


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_table_again_and_again_until_an_interrupt(
    more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exporting(monkeypatch, [ROW], [{**ROW, "version": 4}])
    assert main([*URL, "--interval", "0.001", *more]) == 0
    out = capsys.readouterr().out
    if more:
        assert [json.loads(line)["replicas"][0]["version"] for line in out.splitlines()] == [3, 4]
    else:
        assert out.count("1 of 1 serving") == 2 and out.count("Ctrl-C ends") == 2


def test_on_a_terminal_a_table_takes_the_place_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    with top._screen(top.Output(screen, is_json=False)) as show:
        show(table("mine", [ROW]), {})
    assert screen.getvalue() == ""  # rich writes, to its own console
    assert "1 of 1 serving" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["top", "--interval", "0"], "--interval 0: it must be above 0 seconds and at most a day, 86400"),
        (["top", "--interval", "-0.5"], "--interval -0.5: it must be above 0"),
        (["top", "--interval", "nan"], "--interval nan: it must be above 0"),
        (["top", "--interval", "inf"], "--interval inf: it must be above 0"),
        (["top", "--interval", "1e300"], "--interval 1e+300: it must be above 0"),
        (["top", "mine", "--url", "http://x"], "not both"),
        (["top", "--url", "x"], "begins with http://"),
        (["top", "--url", ""], "begins with http://"),
    ],
)
def test_bad_use(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.ray
@pytest.mark.engine  # after the other tests of the cluster: the pair fills its nodes
def test_a_service_in_ray_is_found_by_its_name_or_as_the_only_one(
    ray_pair: AsyncVLLM, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (["test-pair"], []):
        assert main(["top", *name, "--once", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["service"] == "test-pair"
        assert [row["state"] for row in found["replicas"]] == ["SERVING", "SERVING"]
    assert main(["top", "none", "--once"]) == 2
    said = capsys.readouterr().err
    assert "no service 'none' is running. Services in namespace 'torchrl_moe': 'test-pair' (2 replica(s))." in said
    assert ray_pair.ready()  # it keeps running
