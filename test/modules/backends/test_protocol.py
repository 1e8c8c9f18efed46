"""The protocol of replicas: its data, kept tokens, recorded experts of requests, whose the weights are, checkpoints."""

from __future__ import annotations

import asyncio
import json
import math
import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from support.loops import in_loop
from torchrl_moe.data import KeptTokens, RoutingLayout
from torchrl_moe.data.kept_tokens import dense_mask
from torchrl_moe.errors import EngineError, RouteShapeError, RouteValueError, WeightSyncError
from torchrl_moe.modules.backends.checkpoint import (
    check_weights,
    checkpoint_metadata,
    load_tokenizer,
    tokenizer_files,
)
from torchrl_moe.modules.backends.engine import CALLER, Engine, compare_log_probs
from torchrl_moe.modules.backends.engine_kind import engine_kind
from torchrl_moe.modules.backends.process import link
from torchrl_moe.modules.backends.replica import (
    Completion,
    CompletionOutput,
    KeptIds,
    Request,
    Scoring,
    StageReport,
    SwapReport,
    WeightClaim,
    leaves_ids_out,
    name_kept,
    without_known_rows,
)
from torchrl_moe.modules.backends.request_routes import RequestRoutes
from torchrl_moe.store.manifest import NAMES
from torchrl_moe.testing import ByteTokenizer
from torchrl_moe.testing.tiny_moe import make_tiny_moe


def output(index: int = 0, finish_reason: str = "stop", **fields: object) -> CompletionOutput:
    return CompletionOutput(
        index=index,
        token_ids=np.array([7, 8]),
        text="hi",
        finish_reason=finish_reason,
        policy_versions=np.zeros(2, np.int32),
        **fields,
    )


def completion(*outputs: CompletionOutput) -> Completion:
    return Completion(
        request_id="r", prompt=None, prompt_token_ids=np.array([1, 2, 3]), num_cached_tokens=1, outputs=list(outputs)
    )


def test_rows_that_the_caller_has_are_left_out() -> None:
    rows = np.arange(4, dtype=np.uint8).reshape(4, 1, 1)
    for start, reasons, first in (
        (0, ["stop"], 0),
        (1, ["stop"], 1),
        (3, ["stop"], 1),  # one token was cached: the others were read again, perhaps by other experts
        (3, ["abort"], 0),  # its rest follows all of them
        (3, ["stop", "stop"], 0),  # each with hits of its own
    ):
        given = completion(*(output(i, reason, routed_experts=rows) for i, reason in enumerate(reasons)))
        request = Request(request_id="r", sampling_params={"routed_experts_prompt_start": start}, prompt="hi")
        for one in without_known_rows(given, request).outputs:
            assert one.routed_experts.tolist() == rows[first:].tolist()
    assert without_known_rows(completion(output()), request).outputs[0].routed_experts is None


def test_a_completion_that_an_older_release_saved_can_be_read() -> None:
    """Collectors keep them in checkpoints. Fields that it did not have yet get their defaults."""
    whole = completion(output(resume="forced"))
    whole.prompt_logprobs = np.zeros(3, np.float32)
    again = pickle.loads(pickle.dumps(whole))
    assert again.outputs[0].resume == "forced"
    assert len(again.prompt_logprobs) == 3
    old = pickle.loads(pickle.dumps(whole))
    del old.prompt_logprobs, old.outputs[0].resume, old.outputs[0].kept
    again = pickle.loads(pickle.dumps(old))
    assert (again.prompt_logprobs, again.outputs[0].resume, again.outputs[0].kept) == (None, "none", None)
    assert again.prompt_token_ids.tolist() == whole.prompt_token_ids.tolist()


# -- kept tokens -------------------------------------------------------------------------------------------------------
INF = float("inf")


def kept(ids: list[int], sizes: list[int]) -> KeptIds:
    return KeptIds(np.array(ids, np.int32), np.array(sizes, np.int32))


def check(got: KeptIds | None, ids: list[int], sizes: list[int]) -> None:
    assert got is not None
    assert (got.ids.dtype, got.sizes.dtype) == (np.int32, np.int32)
    assert (got.ids.tolist(), got.sizes.tolist()) == (ids, sizes)


def log_probs_of(mask: torch.Tensor) -> torch.Tensor:
    """Some finite log-probs, -inf where a word is left out; an unlikely one is not."""
    return torch.linspace(-1e30, -0.1, mask.numel()).view(mask.shape).masked_fill(~mask, -INF)


MASKS = st.integers(2, 9).flatmap(
    lambda words: st.lists(
        st.lists(st.booleans(), min_size=words, max_size=words).filter(any), min_size=1, max_size=8
    ).map(torch.tensor)
)


@settings(max_examples=100)
@given(mask=MASKS, data=st.data())
def test_words_named_step_by_step_are_those_of_the_mask(mask: torch.Tensor, data: st.DataObject) -> None:
    """Two answers, sampled together; then cut in two and joined."""
    tokens, words = mask.shape
    other = mask.flip(0)
    steps = [name_kept(log_probs_of(torch.stack([mask[t], other[t]]))) for t in range(tokens)]
    for said, meant in zip(zip(*steps, strict=True), (mask, other), strict=True):
        whole = KeptIds.of_masks(said, tokens)
        if bool(meant.all()):
            assert whole is None
            continue
        assert whole is not None
        as_data = KeptTokens(ids=torch.from_numpy(whole.ids), sizes=torch.from_numpy(whole.sizes))
        as_data.validate(vocabulary=words, num_tokens=tokens)
        assert torch.equal(dense_mask(as_data.ids, as_data.sizes, words), meant)
        assert all(2 * abs(size) <= words for size in whole.sizes.tolist())
        cut = data.draw(st.integers(0, tokens))
        first = KeptIds.of_masks(said[:cut], cut)
        joined = KeptIds.join([first, KeptIds.of_masks(said[cut:], tokens - cut)], [cut, tokens - cut])
        check(joined, whole.ids.tolist(), whole.sizes.tolist())
        if first is not None:
            check(whole.first(cut), first.ids.tolist(), first.sizes.tolist())


# -- parameters --------------------------------------------------------------------------------------------------------
def test_parameters_that_leave_ids_out() -> None:
    others = {"temperature": 0.3, "max_tokens": 7, "stop": ["x"], "repetition_penalty": 1.5}
    for name, leaving, keeping in (
        ("top_k", 5, [0, -1]),
        ("top_p", 0.9, [1]),
        ("min_p", 0.1, [0.0]),
        ("min_tokens", 2, [0]),
        ("bad_words", ["x"], [[]]),
        ("allowed_token_ids", [1], [None]),
        ("structured_outputs", {"regex": "a"}, [None]),
    ):
        assert leaves_ids_out({name: leaving, **others}.get) == name
        assert [leaves_ids_out({name: value, **others}.get) for value in keeping] == [None] * len(keeping)
    assert leaves_ids_out({}.get) is None


# -- which requests follow recorded experts ----------------------------------------------------------------------------
LAYOUT = RoutingLayout(num_layers=2, moe_layers=(1,), top_k=2, num_experts=8)
WHY = "FancyRouter routes inside its kernel"
ABLE, UNABLE = RequestRoutes(LAYOUT), RequestRoutes(LAYOUT, WHY)
ROWS = np.array([[[-1, -1], [5, 3]], [[-1, -1], [-1, -1]]], np.int64)


def routed(**fields: Any) -> Request:
    ids = np.arange(3, dtype=np.int32)
    return Request(**{"request_id": "a", "sampling_params": None, "prompt_token_ids": ids, **fields})


def test_rows_are_brought_to_the_layouts_dtype() -> None:
    rows = ABLE.checked(routed(routed_experts=ROWS)).routed_experts
    assert rows is not None
    assert rows.dtype == np.int8
    assert (rows == ROWS).all()
    plain = routed()
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
        (ABLE, {"routed_experts": np.where(ROWS == 5, 300, ROWS)}, RouteValueError, "0, layer 1 holds expert 300"),
        (ABLE, {"routed_experts": np.where(ROWS == 5, 3, ROWS)}, RouteValueError, "holds expert 3 twice"),
        (ABLE, {"routed_experts": np.where(ROWS == 5, -1, ROWS)}, RouteValueError, "partly -1"),
        (ABLE, {"routed_experts": ROWS[:, ::-1]}, RouteValueError, "layer 0 holds .* no router"),
    ],
)
def test_a_request_that_cannot_be_followed_is_refused(
    routes: RequestRoutes, fields: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        routes.checked(routed(**fields))


def test_words_that_an_engine_has_not_are_refused() -> None:
    """They would be an index out of bounds in its worker."""
    routes = RequestRoutes(LAYOUT, vocabulary=9)
    for ids, bad in (([8, 0], None), ([3, 9], 9), ([-1], -1), ([], None)):
        kept = KeptIds(np.array(ids, np.int32), np.array([0, len(ids), 0], np.int32))
        asked = routed(scoring=Scoring(kept=kept))
        if bad is None:
            assert routes.checked(asked) is asked
        else:
            with pytest.raises(ValueError, match=rf"token id {bad}; this engine has 0\.\.8"):
                routes.checked(asked)
    assert RequestRoutes(LAYOUT).checked(asked) is asked
    with pytest.raises(ValueError, match="cannot score: V2"):
        RequestRoutes(LAYOUT, why_unscored="V2").checked(routed(scoring=Scoring()))


def test_the_rest_of_an_answer_follows_its_first_part() -> None:
    recorded = np.array([[[0, 0], [5, 3]]] * 4, np.uint8)  # as vLLM gives them: 0 on a dense layer
    rows = ABLE.of_part(routed(), output(routed_experts=recorded))
    assert rows is not None
    assert rows.dtype == np.int8
    assert (rows[:, 0] == -1).all()
    assert (rows[:, 1] == recorded[:, 1]).all()
    live = routed(on_resume="live")
    assert ABLE.of_part(routed(), None) is None  # it starts again
    assert ABLE.of_part(routed(), output()) is None  # its routes were not kept
    for routes, request in ((ABLE, live), (UNABLE, routed()), (RequestRoutes(None, "no experts"), routed())):
        assert routes.of_part(request, output(routed_experts=recorded)) is None


# -- an engine's verbs about weights -----------------------------------------------------------------------------------
class Halves(Engine):
    """Weights in two halves, loaded one after the other under a pause; it does nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.updates = self
        self.found = 0  # what the store has under any number
        self.halves = (0, 0)
        self.fetched = 0
        self.is_paused = False

    async def open(self, transport: str, options: Any) -> None:
        assert transport == "memmap"

    async def stage(self, version: int, *how: Any) -> StageReport:
        found = self.found
        await asyncio.sleep(0.001)
        self.fetched = found
        return StageReport(seconds=0.0, nbytes=0, digest=f"digest {found}")

    async def swap(self, version: int, *how: Any) -> SwapReport:
        self.is_paused = True
        await asyncio.sleep(0.001)
        self.halves = (self.fetched, self.halves[1])
        await asyncio.sleep(0.001)
        self.halves = (self.halves[0], self.fetched)
        await asyncio.sleep(0.001)
        self.is_paused = False
        return SwapReport()

    async def fetch(self) -> StageReport:
        return await self.stage_weights(5, "digest", 1, None)

    async def load(self, digest: str) -> SwapReport:
        return await self.swap_weights(5, digest, "keep", False, None)


Halves.__abstractmethods__ = frozenset()


@in_loop
async def test_a_version_is_known_by_its_bytes_and_not_by_its_number() -> None:
    engine = Halves()
    for digest in ("", "digest 1"):
        refused = await engine.load(digest)  # nothing was staged
        assert (refused.started, refused.error) == (False, "version 5 is not what was staged last")
    engine.found = 1
    mine = (await engine.fetch()).digest
    engine.found = 2
    await engine.fetch()  # the same number, by another driver
    assert (await engine.load(mine)).error == "version 5 is not what was staged last"
    assert engine.halves == (0, 0)
    # of two that stage at the same time the first hears of it
    first, second = await asyncio.gather(engine.fetch(), engine.fetch(), return_exceptions=True)
    assert isinstance(first, WeightSyncError) and "another version was staged meanwhile" in str(first)
    assert isinstance(second, StageReport) and second.digest == "digest 2"


@pytest.mark.parametrize("end", ["given up", "taken over"])
@in_loop
async def test_a_driver_that_is_not_the_owner_changes_nothing_until_the_claim_ends(end: str) -> None:
    engine = Halves()
    CALLER.set("owner")
    assert not await engine.owns_weights()  # nobody has claimed anything
    digest = (await engine.fetch()).digest
    for _ in range(2):
        assert await engine.claim_weights("the owner", False) == WeightClaim(granted=True, owner="the owner")
    CALLER.set("other")
    assert await engine.claim_weights("the other", False) == WeightClaim(granted=False, owner="the owner")
    assert not await engine.owns_weights()
    await engine.give_up_weights()  # of a claim that it has not
    for refused in (engine.fetch(), engine.init_weights("memmap", {})):
        with pytest.raises(WeightSyncError, match="takes its weights from the owner now"):
            await refused
    report = await engine.load(digest)
    assert (report.started, engine.halves) == (False, (0, 0))
    assert "takes its weights from the owner now" in str(report.error)
    CALLER.set("owner")
    assert await engine.owns_weights()
    assert (await engine.load(digest)).error is None
    if end == "given up":
        await engine.give_up_weights()
        CALLER.set("other")
        with pytest.raises(WeightSyncError, match="takes its weights from a driver that is gone now"):
            await engine.fetch()
    CALLER.set("other")
    assert (await engine.claim_weights("the other", end == "taken over")).granted
    assert await engine.owns_weights()
    CALLER.set("owner")
    assert not await engine.owns_weights()
    with pytest.raises(WeightSyncError, match="takes its weights from the other now"):
        await engine.fetch()


@pytest.mark.parametrize("offset", range(8))
def test_two_drivers_never_load_halves_of_two_versions(offset: int) -> None:
    """The second takes over at some moment of the first's update; whatever serves then is one version."""

    async def driver(engine: Halves, name: str, version: int, delay: int) -> SwapReport | str:
        CALLER.set(name)  # each of the tasks has its own
        for _ in range(delay):
            await asyncio.sleep(0.0005)
        await engine.claim_weights(name, True)
        try:
            await engine.init_weights("memmap", {})
            engine.found = version
            digest = (await engine.fetch()).digest
            assert digest == f"digest {version}"
            return await engine.load(digest)
        except WeightSyncError as error:
            return str(error)

    async def run() -> tuple[Any, Any, Halves]:
        engine, mixed = Halves(), []

        async def poll() -> None:
            while True:
                if not engine.is_paused and engine.halves[0] != engine.halves[1]:
                    mixed.append(engine.halves)
                await asyncio.sleep(0)

        polling = asyncio.create_task(poll())
        first, second = await asyncio.gather(driver(engine, "a", 1, 0), driver(engine, "b", 2, offset))
        polling.cancel()
        assert mixed == []
        return first, second, engine

    first, second, engine = asyncio.run(run())
    assert second.error is None  # who has the claim is not refused
    assert engine.halves == (2, 2)
    lost = first if isinstance(first, str) else first.error
    assert lost is None or "takes its weights from b now" in lost or "staged" in lost


# -- the comparison of log-probs ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("got", "words"),
    [
        ([-1.5, -2.25], r"up to 5.0e-01 \(at token 1: -1.5 and -1\)"),
        ([-1.5, math.nan], r"up to nan \(at token 2: nan and -2\)"),
        ([-1.0], "the canary has 2 log-probs for a prompt of 2 tokens"),
        ([math.inf, -2.0], r"up to inf \(at token 1"),
    ],
)
def test_the_largest_difference_is_named(got: list[float], words: str) -> None:
    with pytest.raises(WeightSyncError, match=words):
        compare_log_probs(got, [-1.0, -2.0], 1e-3)


# -- what an engine may leave out --------------------------------------------------------------------------------------
@in_loop
async def test_what_an_engine_leaves_out_is_refused() -> None:
    engine = Halves()
    engine.updates = None
    for asked, lacks in (
        (engine.sleep(1, "keep"), "sleep mode"),
        (engine.wake_up(None), "sleep mode"),
        (engine.collective_rpc("x", (), None), "workers to call"),
        (engine.tokenizer(), "tokenizer"),
        (engine.metadata(), "checkpoint"),
        (engine.init_weights("memmap", {}), "weights to update"),
        (engine.stage_weights(1, "digest", 1, None), "weights to update"),
    ):
        with pytest.raises(ValueError, match=f"this engine has no {lacks}"):
            await asked


# -- which engine ------------------------------------------------------------------------------------------------------
def test_a_module_that_is_no_engine_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_an_engine.py").write_text("def preload(): return ''\n")
    (tmp_path / "own_engine.py").write_text("preload = run = print\ndef seeded(arguments, number): return number\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"engine='half_an_engine' has no function run\(\): docs/engines.md shows"):
        engine_kind("half_an_engine")
    for bad in ("sglang", "a b", "", 3, ["vllm"], None):
        with pytest.raises(ValueError, match="engine must be one of vllm, transformers, or a module of yours, got"):
            engine_kind(bad)  # type: ignore[arg-type]
    kind = engine_kind("own_engine")
    assert (kind.PROGRAM, kind.seeded({}, 7), kind.devices_per_replica({})) == ("own_engine", 7, 1)
    assert kind.arguments_of({"a": 1}) == {"a": 1}
    assert str(tmp_path) in kind.engine_environment()["PYTHONPATH"].split(":")
    with pytest.raises(TypeError, match="engine='own_engine' takes its arguments as a mapping, got 'model'"):
        kind.arguments_of("model")


# -- checkpoints and tokenizers ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("shard", ["1GB", "200KB"])
def test_metadata_is_what_safetensors_loads_and_other_formats_of_the_same_weights_are_not_counted(
    tmp_path: Path, shard: str
) -> None:
    make_tiny_moe("deepseek_v3", dtype=torch.bfloat16).save_pretrained(tmp_path, max_shard_size=shard)
    files = [load_file(file) for file in tmp_path.glob("*.safetensors")]
    assert (len(files) > 1) == (shard == "200KB")
    save_file({"layers.0.w1": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    expected = {name: (tensor.dtype, tensor.shape) for file in files for name, tensor in file.items()}
    assert checkpoint_metadata(tmp_path) == expected
    assert {kind for kind, _ in expected.values()} == {torch.bfloat16, torch.float32}  # correction biases are wide


def test_every_dtype_that_torch_can_save_is_known(tmp_path: Path) -> None:
    dtypes = {name: getattr(torch, dtype) for name, dtype in NAMES.items()}
    tensors = {name: torch.zeros(2, 3).to(dtype) for name, dtype in dtypes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert checkpoint_metadata(tmp_path) == {name: (dtype, torch.Size([2, 3])) for name, dtype in dtypes.items()}


OF_F3 = b'{"a": {"dtype": "F3", "shape": [1], "data_offsets": [0, 1]}}'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, r"no \*\.safetensors in .*save_pretrained"),
        (b"", r"model\.safetensors' is not a readable safetensors file .*Git LFS"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "is not a readable .*Git LFS"),
        (len(OF_F3).to_bytes(8, "little") + OF_F3 + b"0", r"model\.safetensors' .*F3"),
    ],
)
def test_a_folder_without_readable_safetensors_is_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(EngineError, match=words):
        checkpoint_metadata(tmp_path)


# -- folders that lack weights -----------------------------------------------------------------------------------------
FORMATS = ("model.safetensors", "consolidated.safetensors", "pytorch_model.bin", "pytorch_model.fp16.bin", "model.gguf")


@pytest.mark.parametrize("names", [[], ["tokenizer.json", "training_args.bin", "optimizer.pt"]])
def test_a_folder_has_weights_in_some_format_or_is_refused(tmp_path: Path, names: list[str]) -> None:
    for name in ("config.json", *names):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=r"' has no weights: .*save_pretrained"):
        check_weights(tmp_path)
    for name in (*FORMATS, "adapter_config.json"):
        (tmp_path / name).touch()
        check_weights(tmp_path)
        (tmp_path / name).unlink()


def test_files_that_the_index_names_and_the_folder_lacks_are_listed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-2.safetensors").touch()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {f"w{i}": f"model-{i}.safetensors" for i in range(1, 7)}}))
    listed = "model-1.safetensors, model-3.safetensors, model-4.safetensors and 2 more files, which its model"
    with pytest.raises(ValueError, match=f"' lacks {listed}"):
        check_weights(str(tmp_path))
    for i in range(7):
        (tmp_path / f"model-{i}.safetensors").touch()
    check_weights(tmp_path)
    index.write_text("{")
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json' cannot be read"):
        check_weights(tmp_path)


# -- tokenizers --------------------------------------------------------------------------------------------------------
def test_a_tokenizer_that_was_sent_works_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    there = load_tokenizer(link.decode(link.encode(tokenizer_files(ByteTokenizer(), trust_remote_code=False))))
    here = ByteTokenizer()
    text = "é <|im_end|>"
    assert there.encode(text) == here.encode(text) == [195, 169, 32, 258]
    assert there.decode(there.encode(text)) == text
    chat = [{"role": "user", "content": "hi"}]
    assert there.apply_chat_template(chat, tokenize=False) == here.apply_chat_template(chat, tokenize=False)
    assert (there.eos_token_id, there.pad_token_id) == (here.eos_token_id, here.pad_token_id)
    with pytest.raises(ValueError, match=r"cannot be saved, so it cannot be sent: builtins\.object"):
        tokenizer_files(object(), trust_remote_code=False)
    for name in ("../outside.json", "/etc/outside.json", "a/../../outside.json"):
        with pytest.raises(ValueError, match="a tokenizer has no file"):
            load_tokenizer({"files": {name: b"{}"}, "trust_remote_code": False})
    assert list(tmp_path.rglob("*")) == [tmp_path / "temporary"]
