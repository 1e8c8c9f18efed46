"""docs/reference/torchrl.md says of each parameter of TorchRL's what has become of it here, and says the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from support import torchrl_page
from support.rollouts import BigramActor
from support.torchrl_page import Book, Pair, compare, has_member, parameters, public_members, shared_methods
from torchrl_moe.collectors import AsyncLLMCollector, LLMCollector
from torchrl_moe.modules import AsyncVLLM, TransformersWrapper, vLLMWrapper
from torchrl_moe.objectives import DAPO, CISPOLoss, GRPOLoss
from torchrl_moe.testing import FakeAsyncVLLM
from torchrl_moe.testing.fake_weights import FakeFleet
from torchrl_moe.weight_update import VLLMDoubleBufferTransport, VLLMWeightSyncScheme


def scheme(*path: str, **given: Any) -> Callable[..., Any]:
    """Call a method of what a weight sync's scheme makes, or its constructor."""

    def call(**arguments: Any) -> Any:
        if not path:
            return VLLMWeightSyncScheme(**{**given, **arguments})
        made: Any = VLLMWeightSyncScheme()
        for name in path[:-1]:
            made = getattr(made, name)(*([FakeFleet(1)] if name == "create_receiver" else []))
        return getattr(made, path[-1])(**arguments)

    return call


def over_fake(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call of a fake engine, which is its first argument."""

    def run(**arguments: Any) -> Any:
        with FakeAsyncVLLM() as engine:
            return call(engine, **arguments)

    return run


def collector(engine: Any, **arguments: Any) -> Any:
    given: Any = {"policy": vLLMWrapper(engine, input_mode="tokens"), **arguments}
    return LLMCollector(None, **given)  # type: ignore[arg-type]


CALLS: dict[str, Callable[..., Any]] = {
    **{kind.__name__: partial(kind, BigramActor()) for kind in (GRPOLoss, DAPO, CISPOLoss)},
    "AsyncVLLM": partial(AsyncVLLM, {"model": "no model"}),
    "AsyncVLLM.generate": over_fake(lambda engine, **arguments: engine.generate("Hello", **arguments)),
    "LLMCollector": over_fake(collector),
    "TransformersWrapper": partial(TransformersWrapper, torch.nn.Linear(1, 1)),
    "vLLMWrapper": over_fake(lambda engine, **given: vLLMWrapper(**{"model": engine, "input_mode": "tokens", **given})),
    "AsyncLLMCollector": partial(AsyncLLMCollector, None),  # type: ignore[arg-type]
    "VLLMWeightSyncScheme": scheme(transport="gloo"),
    "VLLMWeightSyncScheme.init_on_receiver": scheme("init_on_receiver"),
    "VLLMWeightSender.init_all_workers_group": scheme("create_sender", "init_all_workers_group"),
    "VLLMWeightReceiver.apply_weights": scheme("create_receiver", "apply_weights"),
    "VLLMDoubleBufferTransport.receive_weights": VLLMDoubleBufferTransport("no such folder").receive_weights,
}
"""A call of each class that TorchRL has too, by its pair's title or ``title.method``; it starts no engine."""
BOOK = Book.read()
LACKS = "is TorchRL's, and ours lacks it: take it, or refuse it and add a reason 'refused'"


def refusals() -> Iterator[tuple[str, str, Any]]:
    """Those of each pair, and those that it has from others if it can be called here."""
    for pair in BOOK.pairs:
        reasons = BOOK.reasons(pair) if pair.title in CALLS else pair.parameters
        for name in pair.compared.keys() & {name for name, why in reasons.items() if "example" in why}:
            yield pair.title, name, reasons[name]["example"]


def test_every_difference_has_a_reason_and_every_reason_a_difference() -> None:
    assert list(BOOK.problems()) == []


def test_the_page_is_what_the_signatures_say() -> None:
    text = torchrl_page.PAGE.read_text(encoding="utf-8")
    assert text == torchrl_page.written(text, BOOK), torchrl_page.HOW
    assert set(torchrl_page.SHOWN.findall(text)) == {"version", "names", "classes", "tests"}


@pytest.mark.parametrize(("title", "name", "value"), sorted(refusals(), key=str))
def test_what_the_page_calls_refused_is_refused_by_its_name(title: str, name: str, value: Any) -> None:
    method, _, parameter = name.rpartition(".")
    call = CALLS[f"{title}.{method}" if method else title]
    with pytest.raises((TypeError, ValueError), match=parameter):
        call(**{parameter: value})


# -- the check itself, on made-up signatures --------------------------------------------------------------------------


class Theirs:
    def __init__(self, model: Any, size: int = 1, *, mode: str = "a") -> None: ...
    def run(self, fast: bool = True) -> None: ...
    def gone(self) -> None: ...


class Ours:
    def __init__(self, model: Any, size: int = 1, *, mode: str = "a", more: int = 0) -> None: ...
    def run(self, fast: bool = True) -> None: ...
    def gone(self) -> None: ...


class New(Theirs):
    """What a later release of theirs may look like."""

    def __init__(self, model: Any, size: int = 1, *, mode: str = "a", color: str = "red") -> None: ...
    def run(self, fast: bool = True, deep: bool = False) -> None: ...
    def fresh(self) -> None: ...


class Moved(Ours):
    def __init__(self, size: int = 1, model: Any = None, **rest: Any) -> None: ...


def pair(of_theirs: type, ours: type, title: str = "Thing", **reasons: Any) -> Pair:
    made = Pair(title, f"their.{title}", f"our.{title}", **reasons)
    made.__dict__["both"] = (of_theirs, ours)
    return made


def problems(of_theirs: type, ours: type, **reasons: Any) -> list[str]:
    return list(Book([pair(of_theirs, ours, **reasons)], [], []).problems())


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes of this file count as theirs."""
    monkeypatch.setattr(torchrl_page, "THEIR_PACKAGE", __name__.split(".")[0])


def test_what_a_new_release_adds_is_named(made_up: None) -> None:
    assert problems(New, Ours) == [
        f"Thing: 'color' {LACKS}",
        f"Thing: 'run.deep' {LACKS}",
        "Thing: TorchRL's has 'fresh', and ours has not: add it, or a reason under members",
    ]
    reasons = {"color": {"refused": "why"}, "run.deep": {"refused": "why"}}
    assert problems(New, Ours, parameters=reasons, members={"fresh": "why"}) == []


def test_reasons_without_a_difference_are_stale(made_up: None) -> None:
    stale = {"size": {"default": "why"}, "mode": {"keyword": "why", "same": "why"}, "color": {"refused": "why"}}
    assert problems(Theirs, Ours, parameters=stale, members={"gone": "why"}) == [
        "Thing: 'size' has a stale reason 'default': both are 1",
        "Thing: 'mode' has a stale reason 'keyword': both are 'a'",
        "Thing: 'mode' has a stale reason 'same': it is named here",
        "Thing: TorchRL's has no parameter 'color': take its reason out",
        "Thing: 'gone' is no longer missing: take its reason out",
    ]


@pytest.mark.parametrize(
    ("ours", "differences"),
    [
        (lambda model, size=1, extra=3, *, late=0, mode="a": None, {}),
        (lambda model, extra=3, size=1, *, mode="a", late=0: None, {"size": {"position"}}),
        (lambda model, *, size=1, mode="a", late=0: None, {"size": {"keyword"}}),
        (lambda path, size=1, *, mode="a", late=0: None, {"model": {"position", "absent"}}),
        (lambda model, size=2, *, mode, late=0: None, {"size": {"default"}, "mode": {"default"}}),
        (lambda model, size=1: None, {"mode": {"absent"}, "late": {"absent"}}),
        (lambda model, size=1, **rest: None, {"mode": {"caught"}, "late": {"caught"}}),
        (lambda model=0, *, size=2, mode="a", late=0: None, {"model": {"default"}, "size": {"keyword", "default"}}),
    ],
)
def test_differences(ours: Any, differences: dict[str, set[str]]) -> None:
    def theirs(model: Any, size: int = 1, *, mode: str = "a", late: int = 0) -> None: ...

    found = compare(parameters(theirs), parameters(ours))
    assert {row.name: set(row.differences) for row in found if row.differences} == differences


def test_another_place_has_no_excuse_and_an_unseen_refusal_needs_an_example() -> None:
    reasons = {"model": {"default": "why", "wider": "why"}, "size": {"wider": "why"}, "mode": {"same": "why"}}
    at = "stands at another place than in TorchRL's: a value given by position would mean something else"
    assert problems(Theirs, Moved, parameters=reasons) == [f"Thing: 'model' {at}", f"Thing: 'size' {at}"]
    caught = "Thing: 'mode' is caught by ours with **keywords: add 'same', 'wider', 'otherwise' or 'refused', and why"
    assert problems(Theirs, Moved, parameters={**reasons, "mode": {}})[2] == caught
    told = "Thing: 'mode' is refused, which its signature does not show: add an example = <a value that is refused>"
    assert problems(Theirs, Ours, parameters={"mode": {"refused": "why"}}) == [told]
    assert problems(Theirs, Ours, parameters={"mode": {"refused": "why", "example": "b"}}) == []


class Child(Theirs):
    value = 3

    def __init__(self, path: str, _ray_trace_ctx: Any = None) -> None:  # which Ray adds to an actor's class
        self.path = path

    def run(self, slow: bool = True) -> None: ...
    @classmethod
    def made(cls, path: str) -> None: ...


def test_members() -> None:
    package = __name__.split(".")[0]
    assert public_members(Child, package) == ["gone", "made", "run", "value"]
    assert shared_methods(Theirs, Child, package) == ["run"]
    assert [name for name in ("path", "gone", "value", "x") if has_member(Child, name)] == ["path", "gone", "value"]
    assert not has_member(type("Other", (), {"gone": 3}), "gone", like=Theirs)  # a method there
    assert [*parameters(Child), *parameters(Child, "run"), *parameters(Child, "made")] == ["path", "slow", "path"]
