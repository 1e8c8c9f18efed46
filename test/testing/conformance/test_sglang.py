"""The adapter of SGLang's HTTP interface, over a server of ours that speaks it. No SGLang has run it."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from support.conformance import shared_moe
from support.conforming_engine import QUICK, ConformingEngine
from support.faulty_engines import TOKEN_SECONDS, RoutesRetractedAgain
from support.sglang_server import FakeSGLang, serving
from torchrl_moe._errors import EngineError
from torchrl_moe.data import RoutingLayout
from torchrl_moe.testing.conformance import Answer, ConformanceReport, NotOffered, Sampling, SGLangAdapter, check

LAYOUT = RoutingLayout(num_layers=3, moe_layers=(1, 2), top_k=2, num_experts=8)
TRUNCATED = {f"log_probs[{name}]" for name in ("top_k", "top_p", "min_p", "together")}


@contextmanager
def adapter(kind: Any = ConformingEngine, is_old: bool = False, **kwargs: Any) -> Iterator[tuple[SGLangAdapter, Any]]:
    """The adapter, and the server; SGLang routes again what it reads again."""
    fake = FakeSGLang(kind(shared_moe(), token_seconds=TOKEN_SECONDS, is_live=True), is_old)
    with serving(fake) as url:
        yield SGLangAdapter(url, LAYOUT, **kwargs), fake


def failing(report: ConformanceReport) -> set[str]:
    return {one.name for one in report.failures}


def test_it_is_asked_all_that_the_checks_ask() -> None:
    with adapter(sampling_mask=True) as (sglang, fake):
        report = check(sglang, shared_moe(), settings=QUICK)
        assert sglang.weights_version() == fake.engine.version
    # masks are given where top_k is finite; a new request routes its prompt again
    assert failing(report) == {"log_probs[top_p]", "log_probs[min_p]", "resumed_tail"}
    assert [one.name for one in report.results if one.verdict == "not offered"] == []
    assert {path for path, _ in fake.asked} == {
        *("/generate", "/abort_request", "/pause_generation", "/continue_generation", "/update_weights_from_disk"),
    }
    assert {body["mode"] for path, body in fake.asked if path == "/pause_generation"} == {"retract"}


def test_rows_of_retracted_requests_beside_old_log_probs_are_seen_by_name() -> None:
    with adapter(RoutesRetractedAgain) as (sglang, _):
        report = check(sglang, shared_moe(), only=["versions_over_update", "rows_over_update"], settings=QUICK)
    assert report["versions_over_update"].holds, report["versions_over_update"].text
    found = report["rows_over_update"]
    assert found.verdict == "does not hold"
    assert found.off is not None
    assert found.off > 0.05
    assert "with the new weights 0 are wrong: the rows were recomputed, the log-probs were not" in found.seen
    assert "SGLang: pause in_place or abort, not retract" in found.advice


@pytest.mark.parametrize("pause", ["in_place", "abort"])
def test_other_pauses_keep_the_rows_or_end_the_answer(pause: Any) -> None:
    with adapter(RoutesRetractedAgain, pause=pause) as (sglang, fake):
        report = check(sglang, shared_moe(), only=["update", "rows_over_update"], settings=QUICK)
    updates = [body for path, body in fake.asked if path == "/update_weights_from_disk"]
    assert {body["flush_cache"] for body in updates} == {pause == "abort"}
    assert report["update"].holds, report["update"].text
    assert report["rows_over_update"].verdict == ("holds" if pause == "in_place" else "not offered")


def test_an_older_server_gives_all_rows_and_one_version() -> None:
    names = ["resume", "versions", "versions_over_update", *TRUNCATED]
    with adapter(is_old=True) as (sglang, _):
        report = check(sglang, shared_moe(), only=names, settings=QUICK)
    assert failing(report) == {"versions_over_update", *TRUNCATED}
    assert report["resume"].holds
    assert report["versions"].holds


def test_a_request_is_what_the_interface_says() -> None:
    with adapter() as (sglang, fake):
        sglang.generate([[5, 6]], Sampling(max_tokens=3, n=2, top_p=0.5, min_p=0.1), ["x"])
        (one,) = sglang.generate([[5, 6]], Sampling(max_tokens=2, top_k=4))[0]
    first, second = (body for _, body in fake.asked)
    assert first == {
        "rid": "x",
        "input_ids": [5, 6],
        "sampling_params": {
            **{"max_new_tokens": 3, "n": 2, "temperature": 1.0, "top_k": -1, "top_p": 0.5, "min_p": 0.1},
            "ignore_eos": True,
        },
        "return_logprob": True,
        "return_routed_experts": True,
        "routed_experts_start_len": 0,
    }
    assert second["sampling_params"]["top_k"] == 4
    assert "rid" not in second
    assert one.token_ids.tolist() == [entry for entry in one.token_ids.tolist() if 0 <= entry < 259]
    assert (one.routed_experts.shape, one.routed_experts.dtype) == ((3, 3, 2), np.int8)
    assert (one.routed_experts[:, 0] == -1).all()
    assert (one.versions.tolist(), one.finish_reason, one.num_cached_tokens) == ([0, 0], "length", 0)


@pytest.mark.parametrize("is_old", [False, True])
def test_a_resumed_request_asks_for_new_rows_and_keeps_the_old(is_old: bool) -> None:
    with adapter(is_old=is_old) as (sglang, fake):
        ((whole,),) = sglang.generate([[5, 6, 7]], Sampling(max_tokens=4))
        marked = np.full((6, 3, 2), 77, np.int8)
        part = Answer(
            token_ids=whole.token_ids, log_probs=whole.log_probs, routed_experts=marked, versions=whole.versions
        )
        joined = sglang.resume([5, 6, 7], part, Sampling(max_tokens=6))
    _, body = fake.asked[-1]
    assert body["input_ids"] == [5, 6, 7, *whole.token_ids.tolist()]
    assert body["sampling_params"]["max_new_tokens"] == 2
    assert body["routed_experts_start_len"] == 6
    assert len(joined.token_ids) == len(joined.log_probs) == len(joined.versions) == 6
    assert joined.routed_experts.shape == (8, 3, 2)
    assert (joined.routed_experts[:6] == 77).all()
    assert (joined.routed_experts[6:, 1:] < 8).all()


def test_an_aborted_request_without_a_token_has_no_rows() -> None:
    with adapter() as (sglang, fake):
        fake.engine.abort(["x"])
        ((one,),) = sglang.generate([[5, 6]], Sampling(), ["x"])
    assert (len(one.token_ids), one.routed_experts, one.finish_reason) == (0, None, "abort")


def test_another_layout_is_refused_by_name() -> None:
    with adapter() as (sglang, _):
        wrong = SGLangAdapter(sglang._url, RoutingLayout(num_layers=5, moe_layers=(1,), top_k=2, num_experts=8))
        with pytest.raises(EngineError, match="has 18 entries, no multiple of 5 layers times 2 experts"):
            wrong.generate([[5, 6]], Sampling(max_tokens=2))


def test_what_the_server_refuses_is_an_error_with_its_words() -> None:
    with adapter() as (sglang, fake):
        with pytest.raises(EngineError, match=r"POST /generate gave 400: .*is not in \[0, prompt_tokens\]"):
            sglang._generate([5], Sampling(), None, known=9)
        fake.mode, fake.engine.running = "in_place", ["busy"]
        with pytest.raises(EngineError, match="/update_weights_from_disk failed: Flush cache failed"):
            sglang._post("/update_weights_from_disk", {"flush_cache": True})


def test_a_failed_update_is_raised_and_generation_continues() -> None:
    with adapter() as (sglang, fake):
        fake.update = lambda body: {"success": False, "message": "no such file"}  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="no such file"):
            sglang.update_weights(shared_moe())
        assert fake.asked[-1][0] == "/continue_generation"
        assert not fake.engine.is_paused


def answer_of(**changes: Any) -> Answer:
    """What the adapter makes of a response: a prompt of two tokens, an answer of one."""
    rows = np.arange(12, dtype="<i4") % 8
    meta = {
        "output_token_logprobs": [[-1.0, 3, None]],
        "finish_reason": {"type": "length"},
        "routed_experts": base64.b64encode(rows.tobytes()).decode(),
        **changes,
    }
    sglang = SGLangAdapter("http://nowhere", LAYOUT, sampling_mask=True)
    sglang._post = lambda path, body: {"meta_info": meta}  # type: ignore[method-assign]
    ((one,),) = sglang.generate([[5, 6]], Sampling(max_tokens=1, top_k=2 if "masked" in changes else 0))
    return one


@pytest.mark.parametrize("text", ["AAAAAAA-AAAA_AAA", "AAAA", "AAAAA"])
def test_what_is_no_base64_of_rows_is_refused_by_name(text: str) -> None:
    """A decoder that skips what it does not know would shift all that comes after."""
    with pytest.raises(EngineError, match="routed_experts is no base64 of int32"):
        answer_of(routed_experts=text)


def test_experts_that_do_not_exist_stay_as_they_came() -> None:
    """As int8, 257 would be expert 1."""
    rows = np.arange(12, dtype="<i4") % 8
    rows[2] = 257
    found = answer_of(routed_experts=base64.b64encode(rows.tobytes()).decode()).routed_experts
    assert found[0, 1].tolist() == [257, 3]
    assert found.dtype == np.int32
    assert answer_of().routed_experts.dtype == np.int8


def test_what_the_server_does_not_say_is_not_offered() -> None:
    assert answer_of().versions is None
    assert answer_of(weight_version="3").versions.tolist() == [3]
    with pytest.raises(NotOffered, match="no output_token_sampling_logprobs"):
        answer_of(masked=True)


def test_a_server_that_names_no_version_is_asked_in_the_older_way() -> None:
    sglang = SGLangAdapter("http://nowhere", LAYOUT)
    sglang._send = lambda path, body: {"weight_version": "7"} if path == "/get_weight_version" else {}  # type: ignore[method-assign]
    assert sglang.weights_version() == 7
    sglang._send = lambda path, body: {}  # type: ignore[method-assign]
    with pytest.raises(NotOffered, match="neither /model_info nor /get_weight_version of"):
        sglang.weights_version()
