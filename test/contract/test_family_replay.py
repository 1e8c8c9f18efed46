"""Each MoE family of transformers: what is found, what is replayed, and that it equals formulas written by hand."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from support import compatibility
from support.families import (
    EXCLUDED,
    FAMILIES,
    REFUSED,
    E,
    K,
    build,
    is_absent,
    model_type,
    runs_in_bfloat16,
    shared_pair,
)
from support.gating import reference_routing, router_weight
from support.gradients import assert_same, backward, gradients, loss_of
from support.routes import U, experts_seen, random_routes, recorded, tokens
from torchrl_moe.errors import RouteValueError, UnsupportedRouterError
from torchrl_moe.modules import RouterReplay

IDS = tokens() % 60 + 3  # none of the special ones
CORE = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
ONE_IMPLEMENTATION = ("dbrx", "llama4")  # of the experts, their own
WIDE = [name for name in FAMILIES if name not in (*CORE, *ONE_IMPLEMENTATION)]
each_family = pytest.mark.parametrize("family", FAMILIES)
# Where another test of each family proves as much: a few in `make test`, all in `make parity`.
wide = [pytest.param(name, marks=pytest.mark.parity) if name in WIDE else name for name in FAMILIES]
few_families = pytest.mark.parametrize("family", wide)
# How far gradients may be from the reference, as a share of the greatest: 1e-6, and more where linear attention, which
# computes in float32, amplifies the float32 rounding of routers.
DELTA_RULE = {"bailing_hybrid", "glm5_next", "kimi_linear", "lara_mini", "qwen3_5_moe", "qwen3_next", "qwen4_exp"}
ROUNDING = dict.fromkeys(FAMILIES, 1e-6) | dict.fromkeys(DELTA_RULE, 1e-5)

# Their attention reads the keys that a top-k of ReLU scores chooses. At this size some scores tie, and a GPU breaks
# ties otherwise than a CPU.
CHOOSING_KEYS = {"deepseek_v32", "glm_moe_dsa", "hy_v4"}


def pair_in_float64(family: str) -> tuple[nn.Module, RouterReplay]:
    """In float64, as far as the model allows: some routers and norms compute in float32 whatever they are given."""
    model = build(family, dtype=torch.float64)
    model.set_experts_implementation("eager")  # grouped_mm takes no float64
    return model, RouterReplay(model)


@contextmanager
def chosen(model: nn.Module, replay: RouterReplay) -> Iterator[dict[int, Tensor]]:
    """By layer, the experts ``[N, K]`` in use: those the experts are told, or else those whose gate is not 0."""
    used: dict[int, Tensor] = {}

    def keep(layer: int) -> object:
        def hook(_: nn.Module, __: object, out: tuple[Tensor, ...]) -> None:
            if len(out) == 2:  # llama4: scores [N, E], logits
                used[layer] = out[0].nonzero()[:, 1].view(len(out[0]), -1)

        return hook

    hooks = [model.get_submodule(site.name).register_forward_hook(keep(site.layer)) for site in replay.sites]
    with experts_seen(model) as seen:
        yield used
    used.update({layer: experts for layer, (experts, _) in seen.items() if layer in replay.layers})
    for hook in hooks:
        hook.remove()


@contextmanager
def flipped(biases: list[Tensor]) -> Iterator[None]:
    """Other biases, for a while."""
    before = [bias.detach().clone() for bias in biases]
    with torch.no_grad():
        for bias in biases:
            bias.copy_(bias.flip(-1) * 9)
    try:
        yield
    finally:
        with torch.no_grad():
            for bias, values in zip(biases, before, strict=True):
                bias.copy_(values)


def as_sets(experts: Tensor) -> Tensor:
    return experts.sort(-1).values


# what is found


@each_family
def test_the_routers_are_found(family: str) -> None:
    _, replay = shared_pair(family)
    assert replay.layers == tuple(FAMILIES[family].layers)
    assert {(site.num_experts, site.top_k, site.rank) for site in replay.sites} == {(E, K, 2)}
    dense = set(range(replay.num_layers)) - set(replay.layers)
    assert bool(dense) == bool(FAMILIES[family].dense)


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_exact_is_refused_with_the_reason(family: str) -> None:
    model = build(family)
    before = [set(vars(module)) for module in model.modules()]
    with pytest.raises(UnsupportedRouterError, match=REFUSED[family]["says"]):
        RouterReplay(model)
    assert [set(vars(module)) for module in model.modules()] == before


def test_every_moe_of_transformers_is_tested_refused_or_left_out_with_a_reason() -> None:
    models = Path(importlib.import_module("transformers.models").__path__[0])
    marks = re.compile(r"\bself\.experts\b|^class \w*(?:Experts|MoE|Router|Gating)\(", re.MULTILINE)
    found = {path.parent.name for path in models.glob("*/modeling_*.py") if marks.search(path.read_text())}
    listed = {model_type_to_module_name(model_type(name)) for name in (*FAMILIES, *REFUSED)}
    assert found - listed - set(EXCLUDED) == set(), "add a config to families.py, or a reason to EXCLUDED"
    assert listed & set(EXCLUDED) == set()
    there = {name for name in EXCLUDED if (models / name).is_dir()}
    assert there - found == set(), "these have no experts in this release: take them off EXCLUDED"
    # a config of its own, and the model of another family
    shared = {
        kind
        for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
        if {*_modules_of(name)} & found and model_type_to_module_name(kind) not in found
    }
    assert shared - {model_type(name) for name in (*FAMILIES, *REFUSED)} - set(EXCLUDED) == set()


def _modules_of(name: str | tuple[str, ...]) -> Iterator[str]:
    """The folders of causal language models, by their class, which is not loaded for that."""
    for part in (name,) if isinstance(name, str) else name:
        yield transformers._class_to_module[part].split(".")[-2]


def test_each_family_is_there_from_the_release_on_that_brought_it() -> None:
    wrong = [name for name in (*FAMILIES, *REFUSED) if (model_type(name) not in CONFIG_MAPPING) != is_absent(name)]
    assert wrong == [], "correct SINCE in families.py"


@pytest.mark.parametrize(("top_k", "groups"), [(1, 2), (2, 3), (1, 3)])
@pytest.mark.parametrize("family", ["deepseek_v2 (group_limited)", "deepseek_v3"])
def test_live_rows_keep_all_their_groups_where_those_are_more_than_experts(
    family: str, top_k: int, groups: int
) -> None:
    """With K of them alone the logits of deepseek_v3 moved by 2.9, 3.2 and 4.5."""
    model = build(family, num_experts_per_tok=top_k, topk_group=groups)
    replay = RouterReplay(model)
    routes = recorded(model, replay, IDS)
    routes[:, ::2] = U
    with replay.replay(routes):
        logits = model(IDS).logits
    assert torch.equal(logits, model(IDS).logits)


# a model's own routes


@each_family
def test_replaying_its_own_routes_is_bit_equal_and_so_is_a_model_after_remove(family: str) -> None:
    model = build(family, dtype=torch.bfloat16).train()
    if not runs_in_bfloat16(family):
        with pytest.raises(RuntimeError, match="same dtype"):  # transformers by itself
            model(IDS)
        model = build(family).train()
    check_own_routes(model)


@few_families
def test_in_bfloat16_it_is_the_model_that_transformers_loads(family: str, tmp_path: Path) -> None:
    """Routers in float32 included, which 5.24 keeps in many families."""
    model = build(family, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    dtypes, wanted = ({name: p.dtype for name, p in one.named_parameters()} for one in (model, loaded))
    assert dtypes == wanted


@few_families
def test_replaying_its_own_routes_is_bit_equal_in_float32_and_eval_mode_too(family: str) -> None:
    check_own_routes(build(family, dtype=torch.float32).eval())


def check_own_routes(model: nn.Module) -> None:
    logits, grads = backward(model, IDS)
    replay = RouterReplay(model)
    with replay.record() as recording:
        recorded_logits, recorded_grads = backward(model, IDS)
    with replay.replay(recording.routed_experts):
        replayed_logits, replayed_grads = backward(model, IDS)
    replay.remove()
    after, after_grads = backward(model, IDS)
    for got, got_grads in ((recorded_logits, recorded_grads), (replayed_logits, replayed_grads), (after, after_grads)):
        assert torch.equal(got, logits)
        assert_same(got_grads, grads)
    assert logits.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_family
def test_on_a_gpu_own_routes_are_bit_equal_and_a_cpu_s_routes_give_its_logits(family: str, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and not runs_in_bfloat16(family):
        pytest.skip("transformers by itself cannot run it in bfloat16")
    model = build(family, dtype=dtype)
    replay = RouterReplay(model)
    routes = recorded(model, replay, IDS)
    with replay.replay(routes), torch.no_grad():
        on_cpu = model(IDS).logits.float()
    replay.remove()

    model, ids = model.cuda(), IDS.cuda()
    with torch.no_grad():
        logits, again = model(ids).logits, model(ids).logits
    assert torch.equal(logits, again)  # else nothing could be bit-equal
    replay = RouterReplay(model)
    own = recorded(model, replay, ids)
    with torch.no_grad(), replay.replay(own):
        assert torch.equal(model(ids).logits, logits)
    with replay.replay(routes.cuda()):
        given, grads = backward(model, ids)
    assert all(grad.isfinite().all() for grad in grads.values())
    if family in CHOOSING_KEYS:
        return
    greatest = on_cpu.abs().max().item()
    torch.testing.assert_close(
        given.float().cpu(), on_cpu, atol=greatest * (1e-4 if dtype == torch.float32 else 0.1), rtol=0
    )


# any routes


@each_family
def test_random_routes_reach_the_experts_and_equal_the_formula_of_the_family(family: str) -> None:
    model, replay = pair_in_float64(family)
    routes = random_routes(replay)
    with chosen(model, replay) as used, replay.replay(routes):
        logits = model(IDS).logits
    loss_of(logits).backward()  # the context is closed
    grads = gradients(model)
    replay.remove()
    with reference_routing(model, replay.sites, FAMILIES[family].formula, routes):
        wanted, wanted_grads = backward(model, IDS)
    assert used.keys() == set(replay.layers)
    for layer, experts in used.items():
        given = routes[:, :, layer].flatten(0, 1)
        assert torch.equal(experts, as_sets(given) if family == "llama4" else given)
    torch.testing.assert_close(logits, wanted, atol=1e-6 * wanted.abs().max().item(), rtol=0)
    greatest = max(grad.abs().max().item() for grad in wanted_grads.values())
    assert_same(grads, wanted_grads, atol=ROUNDING[family] * greatest)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for site in replay.sites:
        grad = grads[names[id(router_weight(model.get_submodule(site.name)))]]
        assert grad.abs().max() > 1e-3


@few_families
def test_unset_rows_run_live_and_all_others_as_given(family: str) -> None:
    model, replay = shared_pair(family)
    given = random_routes(replay)
    live = torch.rand(given.shape[:3], generator=torch.Generator().manual_seed(4)) < 0.5
    routes = given.masked_fill(live[..., None], U)
    with chosen(model, replay) as used, replay.replay(routes):
        logits, grads = backward(model, IDS)
    complete = given.clone()
    for layer in replay.layers:
        is_live = live[:, :, layer].flatten()
        wanted = routes[:, :, layer].flatten(0, 1)
        assert torch.equal(as_sets(used[layer][~is_live]), as_sets(wanted[~is_live]))
        complete[:, :, layer][live[:, :, layer]] = used[layer][is_live]
    with replay.replay(complete):  # the rows that ran live, given
        same_logits, same_grads = backward(model, IDS)
    assert torch.equal(logits, same_logits)
    assert_same(grads, same_grads)
    first = replay.layers[0]  # its input does not depend on the replay
    own = recorded(model, replay, IDS)[:, :, first].long()
    assert torch.equal(as_sets(complete[:, :, first][live[:, :, first]]), as_sets(own[live[:, :, first]]))


@each_family
def test_a_correction_bias_chooses_and_has_no_other_effect(family: str) -> None:
    model, replay = shared_pair(family)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    biases = [x for name, x in tensors if re.search(r"e_score_correction_bias$|expert_bias$", name)]
    assert bool(biases) == ("+ bias" in replay.scoring)
    if not biases:
        return
    own, routes = recorded(model, replay, IDS), random_routes(replay)
    with replay.replay(routes):
        logits, grads = backward(model, IDS)
    with flipped(biases):
        with replay.replay(routes):
            same_logits, same_grads = backward(model, IDS)
        assert torch.equal(logits, same_logits)
        assert_same(grads, same_grads)
        assert not torch.equal(as_sets(own), as_sets(recorded(model, replay, IDS)))


# with what else a model does


@pytest.mark.parametrize("family", [name for name in wide if name not in ONE_IMPLEMENTATION])
def test_replay_is_the_same_whatever_computes_the_experts(family: str) -> None:
    model = build(family)
    replay = RouterReplay(model)
    routes = random_routes(replay)
    results = []
    for implementation in ("eager", "grouped_mm"):
        model.set_experts_implementation(implementation)
        with replay.record() as recording:
            logits = model(IDS).logits
        with replay.replay(recording.routed_experts):
            assert torch.equal(model(IDS).logits, logits)
        with replay.replay(routes):
            results.append(backward(model, IDS))
    (eager, eager_grads), (grouped, grouped_grads) = results
    torch.testing.assert_close(grouped, eager, atol=1e-5, rtol=0)
    assert_same(grouped_grads, eager_grads, atol=5e-5)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_the_auxiliary_loss_is_of_the_routers_own_choice(family: str) -> None:
    model, replay = shared_pair(family)
    own_loss = importlib.import_module(type(model).__module__).load_balancing_loss_func

    def forward() -> tuple[Tensor, tuple[Tensor, ...]]:
        out = model(IDS, output_router_logits=True)
        return out.aux_loss, out.router_logits

    native, native_logits = forward()
    with replay.replay(recorded(model, replay, IDS)):
        replayed, replayed_logits = forward()
    assert torch.equal(native, replayed)
    assert all(torch.equal(one, other) for one, other in zip(native_logits, replayed_logits, strict=True))
    with replay.replay(random_routes(replay)):
        other, other_logits = forward()
    assert not torch.equal(other_logits[-1], native_logits[-1])
    assert torch.equal(other, own_loss(other_logits, E, K))


def test_layers_that_choose_by_token_have_no_routes() -> None:
    model, replay = shared_pair("deepseek_v4")
    by_token = model.get_buffer("model.layers.0.mlp.gate.tid2eid")[IDS].flatten(0, 1)
    routes = random_routes(replay)
    assert (recorded(model, replay, IDS)[:, :, 0] == U).all()
    with experts_seen(model) as seen, replay.replay(routes):
        model(IDS)
    assert torch.equal(seen[0][0], by_token)
    routes[:, :, 0] = by_token.view(*IDS.shape, K)
    with pytest.raises(RouteValueError, match=r"layer 0 .* has no router"), replay.replay(routes):
        model(IDS)


# the page


def test_the_page_shows_what_was_found() -> None:
    if compatibility.HERE not in compatibility.RELEASES:
        pytest.skip(f"the page is of transformers {compatibility.RELEASES}, this is {transformers.__version__}")
    shown, wanted = compatibility.shown(), compatibility.wanted()
    assert [*shown] == [*wanted]
    assert shown == wanted, compatibility.HOW
    assert all(status for row in shown.values() for status in (row[release] for release in compatibility.RELEASES))
