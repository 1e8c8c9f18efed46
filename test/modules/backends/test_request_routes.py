"""Which requests follow recorded experts, and which are refused, by what the engine is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from torchrl_moe.data import RoutingLayout
from torchrl_moe.errors import RouteShapeError, RouteValueError
from torchrl_moe.modules.backends.replica import CompletionOutput, KeptIds, Request, Scoring
from torchrl_moe.modules.backends.request_routes import RequestRoutes

LAYOUT = RoutingLayout(num_layers=2, moe_layers=(1,), top_k=2, num_experts=8)
WHY = "FancyRouter routes inside its kernel"
ABLE, UNABLE = RequestRoutes(LAYOUT), RequestRoutes(LAYOUT, WHY)
ROWS = np.array([[[-1, -1], [5, 3]], [[-1, -1], [-1, -1]]], np.int64)

WIDE_ROWS = np.full((4, 3, 2), -1, np.int16)
WIDE_ROWS[:3, 1:] = [[[0, 299], [7, 8]]] * 3


def request(**fields: Any) -> Request:
    return Request(
        **{"request_id": "a", "sampling_params": None, "prompt_token_ids": np.arange(3, dtype=np.int32), **fields}
    )


def answer(rows: Any) -> CompletionOutput:
    ids: Any = np.array([7, 8])
    return CompletionOutput(
        index=0,
        token_ids=ids,
        text="",
        finish_reason="abort",
        policy_versions=ids.astype(np.int32),
        routed_experts=rows,
    )


def test_rows_are_brought_to_the_layouts_dtype() -> None:
    rows = ABLE.checked(request(routed_experts=ROWS)).routed_experts
    assert rows is not None
    assert rows.dtype == np.int8
    assert (rows == ROWS).all()
    plain = request()
    assert ABLE.checked(plain) is plain
    assert UNABLE.checked(plain) is plain


@pytest.mark.parametrize(
    ("routes", "fields", "error", "words"),
    [
        (UNABLE, {"routed_experts": ROWS}, ValueError, f"cannot follow recorded experts: {WHY}"),
        (UNABLE, {"on_resume": "forced"}, ValueError, f"on_resume='forced', .* {WHY}"),
        (ABLE, {"on_resume": "forced", "return_routed_experts": False}, ValueError, "needs return_routed_experts=True"),
        (ABLE, {"routed_experts": ROWS, "prompt_token_ids": None, "prompt": "a"}, ValueError, "token ids in place of"),
        (ABLE, {"routed_experts": np.repeat(ROWS, 2, 0)}, RouteShapeError, "at most a row per prompt token, 3, got 4"),
        (ABLE, {"routed_experts": ROWS[:, :1]}, RouteShapeError, r"\[rows, 2, 2\], got \[2, 1, 2\]"),
        (ABLE, {"routed_experts": ROWS[0]}, RouteShapeError, r"got \[2, 2\]"),
        (ABLE, {"routed_experts": ROWS.astype(float)}, RouteValueError, "signed integer dtype, got float64"),
        (
            ABLE,
            {"routed_experts": np.where(ROWS == 5, 300, ROWS)},
            RouteValueError,
            "token 0, layer 1 holds expert 300",
        ),
        (ABLE, {"routed_experts": np.where(ROWS == 5, 3, ROWS)}, RouteValueError, "holds expert 3 twice"),
        (ABLE, {"routed_experts": np.where(ROWS == 5, -1, ROWS)}, RouteValueError, "partly -1"),
        (ABLE, {"routed_experts": ROWS[:, ::-1]}, RouteValueError, "layer 0 holds .* no router"),
    ],
)
def test_a_request_that_cannot_be_followed_is_refused(
    routes: RequestRoutes, fields: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        routes.checked(request(**fields))


def test_words_that_an_engine_has_not_are_refused() -> None:
    """They would be an index out of bounds in its worker."""
    routes = RequestRoutes(LAYOUT, vocabulary=9)
    for ids, bad in (([8, 0], None), ([3, 9], 9), ([-1], -1), ([], None)):
        kept = KeptIds(np.array(ids, np.int32), np.array([0, len(ids), 0], np.int32))
        asked = request(scoring=Scoring(kept=kept))
        if bad is None:
            assert routes.checked(asked) is asked
        else:
            with pytest.raises(ValueError, match=rf"token id {bad}; this engine has 0\.\.8"):
                routes.checked(asked)
    assert RequestRoutes(LAYOUT).checked(asked) is asked
    with pytest.raises(ValueError, match="cannot score: V2"):
        RequestRoutes(LAYOUT, why_unscored="V2").checked(request(scoring=Scoring()))


def test_the_rest_of_an_answer_follows_its_first_part() -> None:
    recorded = np.array([[[0, 0], [5, 3]]] * 4, np.uint8)  # as vLLM gives them: 0 on a dense layer
    rows = ABLE.of_part(request(), answer(recorded))
    assert rows is not None
    assert rows.dtype == np.int8
    assert (rows[:, 0] == -1).all()
    assert (rows[:, 1] == recorded[:, 1]).all()


@pytest.mark.parametrize(
    ("routes", "fields", "first"),
    [
        (ABLE, {}, None),  # it starts again
        (ABLE, {}, answer(None)),  # its routes were not kept
        (ABLE, {"on_resume": "live"}, answer(ROWS)),
        (UNABLE, {}, answer(ROWS)),
        (RequestRoutes(None, "no experts"), {}, answer(ROWS)),
    ],
)
def test_the_rest_of_other_answers_is_routed_live(
    routes: RequestRoutes, fields: dict[str, Any], first: CompletionOutput | None
) -> None:
    assert routes.of_part(request(**fields), first) is None
