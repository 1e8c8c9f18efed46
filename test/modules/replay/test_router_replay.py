"""``RouterReplay`` as users meet it: batches, pads, threads, errors, reports, and what it composes with."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.families import build
from support.gradients import assert_same, backward, gradients, loss_of
from support.html_table import TableReader
from support.routes import FAMILIES, U, experts_seen, pair, random_routes, recorded, tokens
from support.toy_moe import (
    DeafRouter,
    GroupedRouter,
    MaskingRouter,
    NoisyRouter,
    RegroupingRouter,
    StubbornRouter,
    ThresholdRouter,
    ToyMoE,
    TwiceRouter,
)
from torchrl_moe.errors import ReplayError, RouteValueError, UnsupportedRouterError
from torchrl_moe.modules import RouterReplay
from torchrl_moe.modules.replay.binding import Binding
from torchrl_moe.modules.replay.router_replay import ReplayReport
from torchrl_moe.testing import make_tiny_moe

IDS = tokens()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_replay_records_what_it_uses_in_rows_that_are_given_and_in_others(family: str) -> None:
    model, replay = pair(family)
    routes = random_routes(replay)
    routes[:, ::2] = U
    with experts_seen(model) as seen, torch.no_grad(), replay.replay(routes, record=True) as used:
        model(input_ids=IDS)
    for layer in replay.layers:
        assert torch.equal(used.routed_experts[:, :, layer].long(), seen[layer][0].view(2, 6, -1))
        assert torch.equal(used.routed_experts[:, 1::2, layer].long(), routes[:, 1::2, layer].long())
    assert replay.report()[replay.layers[0]]["replayed"] == 6
    with replay.replay(routes) as nothing:
        model(input_ids=IDS)
    assert nothing is None
    with pytest.raises(ReplayError, match="laid out as the batch"), replay.replay(routes, record=True):
        model(input_ids=IDS[:1])


def alone(model: nn.Module, replay: RouterReplay) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Sequences of 4, 6 and 3 tokens, routes of each, and its logits by itself."""
    ids = [tokens(1, length, seed=length)[0] for length in (4, 6, 3)]
    routes = [random_routes(replay, 1, len(row), seed=len(row))[0] for row in ids]
    logits = []
    for row, given in zip(ids, routes, strict=True):
        with replay.replay(given[None]):
            logits.append(model(row[None]).logits[0])
    return ids, routes, logits


@pytest.mark.parametrize("layout", ["left", "right", "jagged"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_batches_equal_single_sequences(family: str, layout: str) -> None:
    model, replay = pair(family)
    parts, given, single = alone(model, replay)
    ids, mask = torch.zeros(3, 6, dtype=torch.long), torch.zeros(3, 6, dtype=torch.long)
    routes = torch.zeros(3, 6, 4, replay.top_k, dtype=torch.long)  # pads hold nonsense
    for i, row in enumerate(parts):
        at = slice(6 - len(row), 6) if layout == "left" else slice(0, len(row))
        ids[i, at], mask[i, at], routes[i, at] = row, 1, given[i]
    if layout == "jagged":
        routes = torch.nested.nested_tensor(given, layout=torch.jagged)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with replay.replay(routes, attention_mask=mask):
        logits = model(ids, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(logits[mask.bool()], torch.cat(single), atol=1e-5, rtol=0)
    assert replay.report()[3] == {"replayed": 13, "live": 5, "refused": 0, "agreement": None}


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_sequences_equal_single_sequences(family: str) -> None:
    model, replay = pair(family)
    parts, routes, single = alone(model, replay)
    positions = torch.cat([torch.arange(len(row)) for row in parts])[None]
    for packed in (torch.cat(routes)[None], torch.nested.nested_tensor(routes, layout=torch.jagged)):
        with replay.replay(packed):
            logits = model(torch.cat(parts)[None], position_ids=positions, use_cache=False).logits[0]
        torch.testing.assert_close(logits, torch.cat(single), atol=1e-5, rtol=0)


def test_bad_samples_run_live_if_asked_to_and_are_counted() -> None:
    model, replay = pair("deepseek_v3")
    routes = random_routes(replay)
    with replay.replay(routes):
        good = model(IDS).logits[1]
    assert replay.refused == ()
    native = model(IDS).logits[0]
    routes[0, 3, 2] = routes[0, 3, 2, 0]
    with replay.replay(routes, on_bad_routes="live"):
        logits = model(IDS).logits
    torch.testing.assert_close(logits, torch.stack([native, good]), atol=1e-5, rtol=0)
    assert replay.refused == (0,)
    assert replay.report()[2] == {"replayed": 6, "live": 6, "refused": 6, "agreement": None}
    with pytest.raises(RouteValueError, match="sample 0, token 3, layer 2 holds"), replay.replay(routes):
        model(IDS)
    assert (replay.refused, replay.report()) == ((), {})


@pytest.mark.parametrize("kind", ["record", "replay"])
def test_a_context_takes_exactly_one_forward(kind: str) -> None:
    model, replay = pair()

    def context() -> Any:
        return replay.record() if kind == "record" else replay.replay(random_routes(replay))

    with pytest.raises(ReplayError, match="no forward pass of this model ran in it"), context():
        pass
    with pytest.raises(ReplayError, match="one forward pass per context: layer 1 ran 2 times"), context():
        model(IDS)
        model(IDS)
    with pytest.raises(ReplayError, match="open already"), context():
        model(IDS)
        with context():
            pass


def test_a_layer_that_does_not_use_its_routes_is_an_error() -> None:
    """A fused kernel put on a block after construction, say, which has no router to ask."""
    model, replay = pair()
    model.model.layers[2].mlp.forward = lambda hidden: hidden
    for context in (replay.replay(random_routes(replay)), replay.record()):
        with pytest.raises(ReplayError, match="layer 2 ran 0 times"), context:
            model(IDS)


def test_an_error_inside_the_forward_leaves_nothing_behind() -> None:
    model, replay = pair()
    native, routes = model(IDS).logits, random_routes(replay)
    with replay.replay(routes):
        wanted = model(IDS).logits
    assert replay.report()
    hook = model.model.layers[2].mlp.experts.register_forward_hook(lambda *_: {}["out of memory, say"])
    with pytest.raises(KeyError), replay.replay(random_routes(replay, seed=9)):
        model(IDS)
    hook.remove()
    assert torch.equal(model(IDS).logits, native)
    assert replay.report() == {}
    with replay.replay(routes):
        assert torch.equal(model(IDS).logits, wanted)


def test_another_thread_can_neither_open_a_context_nor_run_the_model_while_one_is_open() -> None:
    model, replay = pair()
    native = model(IDS).logits
    with ThreadPoolExecutor(1) as pool:
        with replay.replay(random_routes(replay)):
            for other in (pool.submit(model, IDS), pool.submit(recorded, model, replay)):
                with pytest.raises(ReplayError, match="another thread"):
                    other.result()
            model(IDS)
        assert torch.equal(pool.submit(model, IDS).result().logits, native)


def test_two_models_replay_in_one_process_each_on_its_own_routes() -> None:
    """An actor and a reference, whose contexts and backward passes interleave."""
    (actor, handle), (reference, other) = pair(), pair("deepseek_v3")
    routes, others = random_routes(handle), random_routes(other, seed=1)
    with handle.replay(routes):
        wanted, grads = backward(actor, IDS)
    with other.replay(others):
        wanted_other = reference(IDS).logits
    with handle.replay(routes), other.replay(others), experts_seen(actor) as seen:
        value = actor(IDS).logits
        assert torch.equal(reference(IDS).logits, wanted_other)
    assert torch.equal(seen[1][0], routes[:, :, 1].flatten(0, 1))
    assert torch.equal(value, wanted)
    with other.record():
        reference(IDS)
        loss_of(value).backward()
    assert_same(gradients(actor), grads)


def test_the_report_counts_rows_and_agreement() -> None:
    model, replay = pair()
    assert replay.report() == {}
    routes = recorded(model, replay)
    unset = {"replayed": 0, "live": 12, "refused": 0, "agreement": None}
    assert replay.report() == {layer: unset for layer in (1, 2, 3)}
    routes = routes.flip(-1)  # the same sets
    routes[0, :3, 3] = (routes[0, :3, 3] + 1) % 16
    routes[1, 0, 3] = U
    with replay.replay(routes, measure=True):
        model(IDS)
    assert replay.report() == {
        1: {"replayed": 12, "live": 0, "refused": 0, "agreement": 1.0},
        2: {"replayed": 12, "live": 0, "refused": 0, "agreement": 1.0},
        3: {"replayed": 11, "live": 1, "refused": 0, "agreement": 8 / 11},
    }
    with replay.replay(routes):
        model(IDS)
    assert replay.report()[3] == {"replayed": 11, "live": 1, "refused": 0, "agreement": None}


@pytest.mark.parametrize(
    ("router", "message"),
    [
        (NoisyRouter, "replaying its own routes changes its output by up to"),
        (TwiceRouter, "layer 0 ran 2 times, layer 1 ran 2 times"),
        (DeafRouter, "replaying other routes changes nothing"),
        (GroupedRouter, "weight that is 0 or not finite"),
        (MaskingRouter, "replaying other routes makes its output infinite"),
        (ThresholdRouter, "weight that is 0 or not finite"),
        (StubbornRouter, "other ids reach its experts"),
    ],
)
def test_a_model_whose_self_test_fails_is_refused_and_left_alone(router: type[nn.Module], message: str) -> None:
    model = ToyMoE(router)
    before = [set(vars(module)) for module in model.modules()]
    with pytest.raises(UnsupportedRouterError, match=f"ToyMoE failed the self-test: .*{message}"):
        RouterReplay(model)
    assert [set(vars(module)) for module in model.modules()] == before


def test_the_self_test_has_live_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """They keep one group of theirs here, which is as wrong for some, and right for all rows that are replayed."""
    groups = Binding.groups
    monkeypatch.setattr(Binding, "groups", lambda *args: groups(*args)[:, :1])
    with pytest.raises(UnsupportedRouterError, match="its own routes in every other row changes its output by up to"):
        RouterReplay(build("deepseek_v3", num_experts_per_tok=1, topk_group=3))


class KeywordMoE(ToyMoE):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor]:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden=hidden)
        return (hidden,)


class FlatMoE(ToyMoE):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor]:
        return (super().forward(input_ids.flatten())[0].view(*input_ids.shape, -1),)


@pytest.mark.parametrize(("kind", "got"), [(KeywordMoE, r"keywords \['hidden'\]"), (FlatMoE, r"shape \[7, 16\]")])
def test_layers_that_do_not_show_the_batch_are_refused(kind: type[ToyMoE], got: str) -> None:
    with pytest.raises(UnsupportedRouterError, match=rf"\(ToyLayer\) must be called with .*\[B, T, H\].* got {got}"):
        RouterReplay(kind())


def test_the_self_test_looks_at_the_logits_and_at_no_loss() -> None:
    config = {"num_hidden_layers": 1, "output_router_logits": True}  # the output then begins with a loss
    assert RouterReplay(make_tiny_moe("mixtral", **config)).layers == (0,)
    noisy = make_tiny_moe("mixtral", **config)
    noisy.lm_head.register_forward_hook(lambda _, __, logits: logits + torch.rand(1))
    with pytest.raises(UnsupportedRouterError, match="replaying its own routes changes its output"):
        RouterReplay(noisy)


PART = SimpleNamespace(moe_num_experts=8)


@pytest.mark.parametrize("config", [{}, {"num_experts": [8, 8]}, {"text_config": PART}, {"ffn_config": PART}])
def test_a_model_that_is_not_of_transformers_replays(config: dict[str, Any]) -> None:
    model = ToyMoE(RegroupingRouter, **config)
    replay = RouterReplay(model)
    found = "routers in layers [0, 1] of 2, num_experts=8, top_k=2, scoring='softmax'"
    assert repr(replay) == f"RouterReplay(ToyMoE, {found})"
    assert [site.name for site in replay.sites] == ["layers.0.gates.0", "layers.1.gates.0"]
    logits = []
    for routes in (random_routes(replay), random_routes(replay).flip(-1)):
        with replay.replay(routes):
            logits.append(model(tokens() % 32)[0])
    torch.testing.assert_close(*logits)


def test_a_notebook_shows_a_row_for_each_router() -> None:
    unmade = RouterReplay.__new__(RouterReplay)
    read = TableReader(unmade._repr_html_())
    assert ([repr(unmade)], read.rows["tbody"]) == (read.other, []) == (["RouterReplay(not made)"], [])
    replay = RouterReplay(ToyMoE(RegroupingRouter))
    replay.remove()  # it is shown all the same
    read = TableReader(replay._repr_html_())
    assert read.other[0] == "RouterReplay(ToyMoE, routers in 2 of 2 layers)"
    assert read.rows["thead"] == [["layer", "module", "experts", "top-k", "scoring"]]
    assert read.rows["tbody"][1] == ["1", replay.sites[1].name, "8", "2", "softmax"]
    site = replace(replay.sites[0], name="x" * 200, scoring="<b>\n" + "y" * 200)
    replay.sites = [replace(site, layer=layer) for layer in range(200)]
    shown = TableReader(replay._repr_html_()).rows["tbody"]
    assert len(shown) == 65 and shown[-1][0] == "… 136 more"
    assert max(len(cell) for row in shown for cell in row) <= 60


def test_no_model_no_switch_and_routes_of_other_tokens_are_refused_before_the_model_runs() -> None:
    with pytest.raises(ValueError, match="model must be of class Module, got None"):
        RouterReplay(None)  # type: ignore[arg-type]
    model, replay = pair()
    routes = random_routes(replay)
    wrong: dict[str, Any] = {"measure": "no", "record": 1, "packing": 3}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"{name} must be "), replay.replay(routes, **{name: value}):
            pass
    as_many_rows = routes.flatten(0, 1).unflatten(0, (3, 4))
    for given, shape in ((routes[:, :-1], r"\[2, 5\]"), (as_many_rows, r"\[3, 4\]")):
        message = rf"tokens \[2, 6\], the routes are for {shape}.*context or sequence parallelism"
        with pytest.raises(ReplayError, match=message), replay.replay(given):
            model(IDS)


def test_a_report_is_printed_and_shown_as_a_table() -> None:
    done = {"replayed": 1400, "live": 4, "refused": 0, "agreement": 0.875}
    report = ReplayReport({1: done, 3: {**done, "agreement": None}})
    title, header, *lines = repr(report).splitlines()
    assert title == "replay of 2 layers, mean agreement 87.5%"
    assert header.split() == ["layer", "replayed", "rows", "live", "rows", "refused", "rows", "agreement"]
    rows = [["1", "1,400", "4", "0", "87.5%"], ["3", "1,400", "4", "0", "–"]]
    read = TableReader(report._repr_html_())
    assert [line.split() for line in lines] == read.rows["tbody"] == rows and read.other[0] == title
    assert repr(ReplayReport()) == "replay: no context has come to its end yet"
    assert "no context" in ReplayReport()._repr_html_()
    report = ReplayReport(dict.fromkeys(range(200), done))
    assert len(repr(report).splitlines()) == 2 + 64 + 1
    assert TableReader(report._repr_html_()).rows["tbody"][-1][0] == "… 136 more"


def test_two_models_replay_in_two_threads() -> None:
    barrier = threading.Barrier(2)

    def work(seed: int) -> list[Tensor]:
        model, replay = pairs[seed]
        routes, got = random_routes(replay, seed=seed), []
        for _ in range(5):
            with replay.replay(routes):
                barrier.wait(60)
                got.append(model(IDS).logits)
        return got

    pairs = [pair(), pair()]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(work, range(2)))
    barrier = threading.Barrier(1)
    for seed, got in enumerate(together):
        assert all(torch.equal(one, other) for one, other in zip(got, work(seed), strict=True))
