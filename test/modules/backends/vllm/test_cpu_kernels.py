"""Each function in the place of a Triton kernel against plain loops, called by vLLM's own code where that is simple.

Legend: N requests, S slots, R rows of logits, V vocabulary, G cache groups, B blocks of a row, L the longest sequence.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from torchrl_moe.modules.backends.vllm import cpu_kernels
from torchrl_moe.modules.backends.vllm.cpu_kernels import KERNELS, MissingKernelError, by_name

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM has its own kernels here")

S, V, L = 9, 70, 40
INF = math.inf
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def v2() -> Iterator[SimpleNamespace]:
    """vLLM's modules with kernels, where launches run ours, to the end of this file. All have our parameters."""
    from vllm.triton_utils import triton
    from vllm.triton_utils.dispatcher import KernelOverride
    from vllm.utils.math_utils import next_power_of_2
    from vllm.v1.worker.cpu.buffer_utils import UvaBuffer

    hosts = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "next_power_of_2", next_power_of_2, raising=False)
        for name, function in KERNELS.items():
            module, _, attribute = name.rpartition(".")
            host = hosts[module.rpartition(".")[2]] = importlib.import_module(module)
            kernel = getattr(host, attribute)
            patch.setattr(host, attribute, KernelOverride(kernel, by_name(name, kernel, function)))
        # as vLLM's CPU workers do, but only here
        patch.setattr(hosts["buffer_utils"], "UvaBuffer", UvaBuffer)
        yield SimpleNamespace(**hosts)


def ints(rng: np.random.Generator, low: int, high: int, size: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.from_numpy(rng.integers(low, high, size=size)).to(dtype)


def cumulated(lengths: Any) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


class Step:
    """A random step: N requests, some in their prompt, whose tokens end inside it or go on; N may be 0."""

    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, (rng := np.random.default_rng(seed))
        self.n = n = 0 if seed == 0 else int(rng.integers(1, 6))
        index = torch.int64 if seed % 2 else torch.int32
        self.slots = torch.from_numpy(rng.permutation(S)[:n]).to(index)
        self.lens = rng.integers(1, 6, size=n)
        self.starts = cumulated(self.lens)
        self.total = int(self.starts[-1])
        self.computed = ints(rng, 0, 15, S)
        self.prefill = ints(rng, 1, 25, S)
        self.tokens = ints(rng, 0, V, (S, L))
        self.seq_lens = torch.zeros(S, dtype=torch.int32)
        for i, slot in self.requests():
            self.seq_lens[i] = int(self.computed[slot]) + int(self.lens[i])

    def requests(self) -> list[tuple[int, int]]:
        """The number and the slot of each request."""
        return list(enumerate(self.slots.tolist()))

    def logits(self, rows: int, vocabulary: int = V) -> torch.Tensor:
        return torch.from_numpy(self.rng.normal(size=(rows, vocabulary)).astype(np.float32) * 3)

    def choice(self, values: Any) -> torch.Tensor:
        """One of the values for each slot, float32."""
        return torch.from_numpy(self.rng.choice(values, size=S).astype(np.float32))

    def span(self, i: int) -> range:
        return range(int(self.starts[i]), int(self.starts[i + 1]))


@pytest.fixture(params=range(4))
def step(request: pytest.FixtureRequest) -> Step:
    return Step(request.param)


@pytest.fixture(params=range(1, 5))
def full_step(request: pytest.FixtureRequest) -> Step:
    """Where vLLM asks for nothing in an empty step."""
    return Step(request.param)


def blank(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.full(size, -7, dtype=dtype)


@pytest.mark.parametrize("lookahead", [0, 2])
def test_prompt_tokens_those_ahead_positions_and_places(v2: SimpleNamespace, step: Step, lookahead: int) -> None:
    ids, ahead, pos, lens = blank(40), blank(lookahead, S), blank(40, dtype=torch.int64), blank(S)
    expected_ids, expected_ahead, expected_pos = ids.tolist(), ahead.tolist(), pos.tolist()
    for i, slot in step.requests():
        first, prefill = int(step.computed[slot]), int(step.prefill[slot])
        for k, place in enumerate(step.span(i)):
            expected_pos[place] = first + k
            if first < prefill:
                expected_ids[place] = int(step.tokens[slot, first + k])
        for k in range(lookahead if first < prefill else 0):
            at = first + int(step.lens[i]) + k
            expected_ahead[k][slot] = int(step.tokens[slot, at]) if at < prefill else 0
    v2.input_batch.prepare_prefill_inputs(ids, ahead, step.slots, step.starts, step.tokens, step.prefill, step.computed)
    v2.input_batch.prepare_pos_seq_lens(step.slots, step.starts, step.computed, pos, lens)
    assert (ids.tolist(), ahead.tolist(), pos.tolist()) == (expected_ids, expected_ahead, expected_pos)
    assert torch.equal(lens, step.seq_lens)  # zeros after N
    # rows are numbered within their request
    slots, places = v2.input_batch.expand_idx_mapping(step.slots, step.total, step.starts, 8)
    pairs = [(slot, k) for i, slot in step.requests() for k in range(len(step.span(i)))]
    assert list(zip(slots.tolist(), places.tolist(), strict=True)) == pairs
    assert slots.dtype == step.slots.dtype


@pytest.mark.parametrize("new", [0, 1])
def test_sampled_and_draft_tokens_go_where_logits_are_computed(v2: SimpleNamespace, step: Step, new: int) -> None:
    per_request = np.minimum(step.rng.integers(1, 4, size=step.n), step.lens)
    cu = cumulated(per_request)
    ids, last = blank(40), ints(step.rng, 0, V, (S, 1), torch.int64)
    drafts = ints(step.rng, 0, V, (S, 3), torch.int64)
    expected, places = ids.tolist(), []
    for i, slot in step.requests():
        rows, length, prefill = int(per_request[i]), int(step.seq_lens[i]), int(step.prefill[slot])
        at = list(step.span(i))[-rows:]
        places += at
        if length > prefill:
            if new and length - rows >= prefill:
                expected[at[0]] = int(last[slot, 0])
            for k, place in enumerate(at[new:]):
                expected[place] = int(drafts[slot, k])
    indices = v2.input_batch.combine_sampled_and_draft_tokens(
        ids, step.slots, last, step.starts, step.seq_lens, step.prefill, drafts, cu, int(cu[-1]), new
    )
    assert (indices.tolist(), ids.tolist()) == (places, expected)


@pytest.mark.parametrize("counted", [True, False])
def test_a_step_is_added_to_the_state(v2: SimpleNamespace, step: Step, counted: bool) -> None:
    """Chunks of prompts sample nothing; rejected drafts are computed again; a slot of -1 is passed over."""
    sampled, cu = ints(step.rng, 0, 4, step.n), cumulated([3] * step.n)
    chunk = [int(step.seq_lens[i]) < int(step.prefill[slot]) for i, slot in step.requests()]
    made = [0 if chunk[i] else int(sampled[i]) for i in range(step.n)]
    num, rejected = v2.input_batch.get_num_sampled_and_rejected(sampled, step.seq_lens, cu, step.slots, step.prefill)
    assert (num.tolist(), rejected.tolist()) == (made, [0 if chunk[i] else 3 - made[i] for i in range(step.n)])

    alone, expected = step.computed.clone(), step.computed.tolist()
    for i, slot in step.requests():
        expected[slot] += int(step.lens[i])
    v2.input_batch.post_update_num_computed_tokens(step.slots, alone, step.starts)
    assert alone.tolist() == expected

    new, last = ints(step.rng, 0, V, (step.n, 3), torch.int64), ints(step.rng, 0, V, (S, 1), torch.int64)
    total, counts = ints(step.rng, 1, 20, S), ints(step.rng, 0, 3, (S, V))
    slots = step.slots.clone()
    if step.n > 1:
        slots[0] = -1
    state = [step.computed, last, counts, step.tokens, total]
    computed_, last_, counts_, tokens_, total_ = (x.tolist() for x in state)
    for i, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        for token in new[i, : made[i]].tolist():
            tokens_[slot][total_[slot]] = token
            total_[slot] += 1
            last_[slot] = [token]
            counts_[slot][token] += int(counted)
        computed_[slot] += int(step.lens[i]) - int(rejected[i])
    v2.input_batch.post_update(
        slots, step.computed, last, counts if counted else None, new, num, rejected, step.starts, step.tokens, total
    )
    assert [x.tolist() for x in state] == [computed_, last_, counts_, tokens_, total_]


def test_drafts_are_kept_and_starts_may_be_absent() -> None:
    """vLLM 0.33 hands over drafts; before a step's tokens are known, there are no starts."""
    slots, out = torch.tensor([2, -1, 0]), torch.zeros(3, 2, dtype=torch.int64)
    computed, rejected = (torch.tensor(x, dtype=torch.int32) for x in ([5, 5, 5], [1, 1, 2]))
    none, tokens = torch.zeros(3, dtype=torch.int32), torch.zeros(3, 1, dtype=torch.int64)
    drafts = torch.tensor([[1, 2], [3, 4], [5, 6]])
    given = slots, computed, tokens, None, tokens, none, rejected, None, none.expand(L, -1).T, none, drafts, out
    cpu_kernels.post_update(*(None if one is None else one.numpy() for one in given))
    assert (out.tolist(), computed.tolist()) == ([[5, 6], [0, 0], [1, 2]], [3, 5, 4])


@pytest.mark.parametrize("groups", [1, 3])
def test_block_tables(v2: SimpleNamespace, step: Step, groups: int) -> None:
    """Blocks are appended and overwritten, gathered for a step, and say where its tokens go."""
    sizes, enabled = [4, 8, 4][:groups], [True, True, False][:groups]
    tables = v2.block_table.BlockTables(sizes, S, 64, [10, 6, 10][:groups], CPU, slot_mapping_enabled=enabled)
    blocks: dict[tuple[int, int], list[int]] = {}
    for overwrite, count in ((True, 2), (False, 3), (True, 5)):
        for slot in range(S):
            new = tuple(step.rng.integers(1, 99, size=count).tolist() for _ in range(groups))
            tables.append_block_ids(slot, new, overwrite=overwrite)
            for group in range(groups):
                before = [] if overwrite else blocks[group, slot]
                blocks[group, slot] = [*before, *new[group]]
        tables.apply_staged_writes()
    gathered = tables.gather_block_tables(step.slots, step.n)
    for group in range(groups):
        assert gathered[group][:, :5].tolist() == [blocks[group, slot] for _, slot in step.requests()]

    pos = torch.zeros(64, dtype=torch.int64)
    expected = [[-1] * 64 for _ in range(groups)]
    if step.n > 1 and step.seed % 2:
        step.slots[-1] = -1
    for i, slot in step.requests():
        for k, place in enumerate(step.span(i)):
            pos[place] = int(step.computed[slot]) % 14 + k
            for group in range(groups):
                if slot >= 0 and enabled[group]:
                    block = blocks[group, slot][int(pos[place]) // sizes[group]]
                    expected[group][place] = block * sizes[group] + int(pos[place]) % sizes[group]
    assert tables.compute_slot_mappings(step.slots, step.starts, pos, 64).tolist() == expected


def test_context_parallelism_is_refused(v2: SimpleNamespace) -> None:
    tables = v2.block_table.BlockTables([4], S, 64, [10], CPU, cp_size=2)
    with pytest.raises(ValueError, match="CP_SIZE=2"):
        tables.compute_slot_mappings(torch.tensor([0]), cumulated([1]), torch.zeros(64, dtype=torch.int64), 64)


def test_blocks_behind_a_sliding_window_are_null() -> None:
    source, target = torch.arange(1, 13, dtype=torch.int32).view(2, 6), torch.zeros(2, 6, dtype=torch.int32)
    cpu_kernels.gather_block_tables(
        np.array([1, 0]), *(np.array([t.data_ptr()], dtype=np.uint64) for t in (source, target)),
        np.array([6]), np.array([[6, 4]], dtype=np.int32), 2, np.array([3, 17], dtype=np.int32),
        np.array([5], dtype=np.int32), np.array([4], dtype=np.int32), MASK_SLIDING_WINDOW=True,
    )  # fmt: skip
    assert target[0].tolist() == [0, 0, 0, 10, 11, 12]  # tokens 0 to 11 are left: three blocks
    assert target[1, :4].tolist() == [1, 2, 3, 4]


def test_staged_writes_of_a_vector(v2: SimpleNamespace) -> None:
    vector = v2.buffer_utils.StagedWriteTensor(5, torch.float32, CPU)
    vector.stage_write_elem(3, 0.5)
    vector.stage_write_elem(0, 2.5)
    vector.apply_write()
    assert vector.gpu.tolist() == [2.5, 0, 0, 0.5, 0]


@pytest.mark.parametrize("values", [[0.0, 1.0], [0.7, 1.3], [0.0, 1.0, 0.7]])
def test_temperature_and_min_p(v2: SimpleNamespace, step: Step, values: list[float]) -> None:
    logits, temperature, share = step.logits(step.n), step.choice(values), step.choice([0.0, 0.05, 0.2, 1.0])
    expected = logits.clone()
    for i, slot in step.requests():
        if float(temperature[slot]):
            expected[i] = expected[i] / temperature[slot]
    v2.gumbel.apply_temperature(logits, step.slots, temperature)
    assert torch.equal(logits, expected)
    rows = logits.tolist()
    for i, slot in step.requests():
        least = max(rows[i]) + (math.log(float(share[slot])) if share[slot] else -INF)
        rows[i] = [x if x >= least else -INF for x in rows[i]]
    v2.min_p.apply_min_p(logits, step.slots, share)
    assert logits.tolist() == rows


def murmur3(seed: int, position: int, token: int, start: int = 0) -> int:
    """MurmurHash3 (x86, 32 bits) of 16 bytes: the seed, the position's low half, the token."""

    def rotated(x: int, bits: int) -> int:
        return (x << bits | x >> 32 - bits) % 2**32

    h = start
    for word in (seed % 2**32, (seed >> 32) % 2**32, position % 2**32, token):
        h ^= rotated(word * 0xCC9E2D51 % 2**32, 15) * 0x1B873593 % 2**32
        h = (rotated(h, 13) * 5 + 0xE6546B64) % 2**32
    h ^= 16
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


def noised(row: list[float], seed: int, position: int, fp64: bool) -> list[float]:
    """Logits plus Gumbel noise, in Python's float64; noise of float32 takes the other end of the interval."""
    out = []
    for token, logit in enumerate(row):
        low = murmur3(seed, position, token)
        if fp64:
            bits = (murmur3(seed, position, token, 0x9E3779B9) << 32 | low) >> 11
            out.append(logit - math.log(-math.log((bits + 0.5) / 2**53)))
        else:
            out.append(logit - math.log(-math.log1p(-(low + 0.5) / 2**32)))
    return out


@pytest.mark.parametrize(
    ("temperatures", "apply", "drafting", "fp64"),
    [
        ([0.0], False, False, False),
        ([1.0], False, False, False),
        ([0.0, 1.0, 0.7], True, False, False),
        ([0.0, 0.7], True, True, False),
        ([0.0, 1.0], False, False, True),
        ([1.3], True, True, True),
    ],
)
def test_sampling_takes_the_best_of_logits_and_noise(
    v2: SimpleNamespace, step: Step, temperatures: list[float], apply: bool, drafting: bool, fp64: bool
) -> None:
    of_slot = step.choice(temperatures)
    seeds, pos = ints(step.rng, -(2**63), 2**63 - 1, S, torch.int64), ints(step.rng, 0, 5000, step.n, torch.int64)
    logits = step.logits(step.n)
    if step.n > 1:
        step.slots[0] = -1  # padding: greedy
    got = v2.gumbel.gumbel_sample(logits, step.slots, of_slot, seeds, pos, apply, drafting, use_fp64=fp64)
    assert got.dtype == torch.int64
    for i, slot in enumerate(step.slots.tolist()):
        row, t = logits[i].tolist(), float(of_slot[slot]) if slot >= 0 else 0.0
        if t:
            scaled = [x / t for x in row] if apply else row
            row = noised(scaled, int(seeds[slot]), int(pos[i]) + (2**30 if drafting else 0), fp64)
        assert row[int(got[i])] >= max(row) - 1e-5  # rounding may decide between equals


def test_samples_follow_the_softmax_over_several_blocks(v2: SimpleNamespace) -> None:
    rows, vocabulary = 3000, 1500  # vLLM's blocks are of 1024 words
    logits = torch.full((1, vocabulary), -INF)
    kept = [3, 700, 1030, 1499]
    logits[0, kept] = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    got = v2.gumbel.gumbel_sample(
        logits.expand(rows, -1), torch.zeros(rows, dtype=torch.int32), torch.ones(1), torch.tensor([-5]),
        torch.arange(rows), False, False,
    )  # fmt: skip
    shares = [float((got == token).float().mean()) for token in kept]
    assert sum(shares) == pytest.approx(1)
    assert shares == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.04)  # 4 standard deviations


@pytest.mark.parametrize("fp64", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_only_kept_token_wins(v2: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, fp64: bool, rows: int) -> None:
    """The largest hash makes u round to 1, whose noise would be -inf."""

    def largest(seeds: np.ndarray, positions: np.ndarray, vocabulary: int, domain: int = 0) -> np.ndarray:
        return np.full((len(seeds), vocabulary), 2**32 - 1, dtype=np.uint32)

    monkeypatch.setattr(cpu_kernels, "_murmur3", largest)
    logits = torch.full((rows, V), -INF)
    logits[:, 5] = 1.0
    zeros = torch.zeros(rows, dtype=torch.int64)
    got = v2.gumbel.gumbel_sample(logits, zeros, torch.ones(1), zeros[:1], zeros, False, False, use_fp64=fp64)
    assert got.tolist() == [5] * rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("custom", [0, 5])
def test_log_probs_and_ranks(v2: SimpleNamespace, full_step: Step, dtype: torch.dtype, custom: int) -> None:
    """The sampled token first; then a request's own tokens, or the top ones where it names none."""
    step = full_step
    logits = step.logits(step.n).to(dtype)
    logits[logits < -3] = -INF
    sampled = ints(step.rng, 0, V, step.n, torch.int64)
    state = v2.logprob.LogprobTokenIdsState(S, CPU)
    own: dict[int, list[int]] = {slot: [] for slot in range(S)}
    for slot in range(0, S, 2):
        own[slot] = step.rng.permutation(V)[: int(step.rng.integers(0, custom + 1))].tolist()
        state.num_token_ids.np[slot] = len(own[slot])
        state.token_ids.gpu[slot, : len(own[slot])] = torch.tensor(own[slot], dtype=torch.int32)
    state.num_token_ids.copy_to_uva()
    got = v2.logprob.compute_topk_scores(logits, 3, sampled, None, state, step.slots, custom)
    for i, slot in step.requests():
        row = logits[i].tolist()
        total = math.log(math.fsum(math.exp(x) for x in row))
        top = sorted(range(V), key=lambda token: -row[token])[:3]
        tokens = [int(sampled[i]), *((own[slot] if custom else []) or top)]
        values = got.logprobs[i].tolist()
        assert values[: len(tokens)] == pytest.approx([row[token] - total for token in tokens], abs=1e-5)
        assert all(value == -INF for value in values[len(tokens) :])
        ids = got.logprob_token_ids[i].tolist()[: len(tokens)]
        assert [row[a] for a in ids] == [row[b] for b in tokens]  # top tokens may be equals
        assert int(got.selected_token_ranks[i]) == sum(x >= row[tokens[0]] for x in row)


@pytest.mark.parametrize("width", [1, 20, V])
@pytest.mark.parametrize("per_request", [1, 2])
def test_kept_tokens(v2: SimpleNamespace, step: Step, width: int, per_request: int) -> None:
    """Rows of one kept token, of all, and of none sampled."""
    num = ints(step.rng, 0, per_request + 1, step.n)
    logits = step.logits(step.n * per_request)
    for row, limit in zip(logits, step.rng.choice([-9, 0, 3], size=len(logits)).tolist(), strict=True):
        row[row < min(limit, float(row.max()))] = -INF
    active = [k < int(num[i]) for i in range(step.n) for k in range(per_request)]
    kept = [row.isfinite().nonzero()[:, 0].tolist() if on else [] for row, on in zip(logits, active, strict=True)]
    cu = cumulated([per_request] * step.n)
    masks = v2.output.SamplingMaskTensors.from_logits(logits, cu, num, width, per_request)
    assert masks.counts.tolist() == [len(row) for row in kept]
    lists = masks.tolists(num.numpy())
    rows = [lists.token_ids[a:b].tolist() for a, b in zip(lists.offsets, lists.offsets[1:], strict=False)]
    # vLLM lists a request without a sampled token only if there is one token each
    assert rows == [row for row, on in zip(kept, active, strict=True) if on or per_request == 1]


def test_penalties(v2: SimpleNamespace, full_step: Step) -> None:
    """Two rows of each request: the second follows a draft, which counts as said."""
    step = full_step
    words, counts = torch.zeros(S, (V + 31) // 32, dtype=torch.int32), torch.zeros(S, V, dtype=torch.int32)
    prompt = torch.minimum(step.prefill, ints(step.rng, 1, 25, S))
    counts += 5  # of an earlier request in the slot
    v2.penalties.bincount(step.slots, step.tokens, prompt, step.prefill, words, counts, int(step.prefill.max()))
    repetition, frequency, presence = (step.choice(pair) for pair in ([1.0, 1.3], [0.0, 0.4], [0.0, 0.2]))
    rows, drafts = step.slots.repeat_interleave(2), ints(step.rng, 0, V, 2 * step.n)
    places = torch.tensor([0, 1] * step.n, dtype=torch.int32)
    logits = step.logits(2 * step.n)
    expected = logits.tolist()
    for i, slot in enumerate(rows.tolist()):
        prompt_words = set(step.tokens[slot, : int(prompt[slot])].tolist())
        said = step.tokens[slot, int(prompt[slot]) : int(step.prefill[slot])].tolist()
        said += drafts[i : i + 1].tolist() if i % 2 else []
        for token in range(V):
            x, often = expected[i][token], said.count(token)
            if token in prompt_words or often:
                x = x / float(repetition[slot]) if x > 0 else x * float(repetition[slot])
            expected[i][token] = x - float(frequency[slot]) * often - float(presence[slot]) * bool(often)
    v2.penalties.apply_penalties(logits, rows, drafts, places, repetition, frequency, presence, words, counts)
    np.testing.assert_allclose(logits.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("check", [False, True])
def test_allowed_tokens_biases_and_stop_tokens(v2: SimpleNamespace, step: Step, check: bool) -> None:
    rng = step.rng
    allowed, biased = (torch.from_numpy(np.stack([rng.permutation(V)[:6] for _ in range(S)])).int() for _ in range(2))
    stop = allowed.flip(1)[:, :4].contiguous()  # now and then they are all that is allowed
    amounts = torch.from_numpy(rng.normal(size=(S, 6)).astype(np.float32))
    num_allowed, num_biased, num_stop = ints(rng, 0, 2, S) * 6, ints(rng, 0, 4, S), ints(rng, 0, 5, S)
    num_allowed[::3] = 2
    stop[::3] = allowed[::3, :4]
    pos, least, restore = ints(rng, 0, 30, step.n, torch.int64), ints(rng, 0, 60, S), ints(rng, 0, 2, S)
    logits = step.logits(step.n)
    expected = logits.tolist()
    for i, slot in enumerate(step.slots.tolist()):
        row = expected[i]
        if num_allowed[slot]:
            kept = allowed[slot, : int(num_allowed[slot])].tolist()
            row[:] = [x if token in kept else -INF for token, x in enumerate(row)]
        for k in range(int(num_biased[slot])):
            row[int(biased[slot, k])] += float(amounts[slot, k])
        if int(pos[i]) + 1 < int(least[slot]):
            ids = stop[slot, : int(num_stop[slot])].tolist()
            masked = [-INF if token in ids else x for token, x in enumerate(row)]
            if not (check and restore[slot] and max(masked) == -INF):
                row[:] = masked
    counted = num_allowed, allowed, num_biased, biased, amounts, least, num_stop, restore, stop
    v2.logit_bias.apply_logit_bias(logits, step.slots, pos, *counted, check)
    np.testing.assert_allclose(logits.numpy().reshape(-1), np.array(expected, np.float32).reshape(-1), atol=1e-6)


def test_bad_words(v2: SimpleNamespace, step: Step) -> None:
    """Words of 1, 2 and 3 tokens, over an answer that may be empty and drafts that continue it."""
    tokens = ints(step.rng, 0, 2, (S, L))
    words, offsets = ints(step.rng, 0, 2, (S, 9)), torch.tensor([[0, 1, 3, 6]] * S, dtype=torch.int32)
    num, prompt = ints(step.rng, 0, 4, S), ints(step.rng, 1, 9, S)
    total = prompt + ints(step.rng, 0, 5, S)
    rows, drafts = step.slots.repeat_interleave(3), ints(step.rng, 0, 2, 3 * step.n)
    logits = step.logits(3 * step.n)
    expected = logits.tolist()
    for i, slot in enumerate(rows.tolist()):
        answer = tokens[slot, int(prompt[slot]) : int(total[slot])].tolist() + drafts[i - i % 3 + 1 : i + 1].tolist()
        for k in range(int(num[slot])):
            *before, last = words[slot, int(offsets[slot, k]) : int(offsets[slot, k + 1])].tolist()
            if len(before) <= len(answer) and answer[len(answer) - len(before) :] == before:
                expected[i][last] = -INF
    places = torch.tensor([0, 1, 2] * step.n, dtype=torch.int32)
    v2.bad_words.apply_bad_words(logits, rows, words, offsets, num, tokens, prompt, total, drafts, places, 3)
    assert logits.tolist() == expected


def test_prompt_tokens_to_score(v2: SimpleNamespace, step: Step) -> None:
    if step.n:
        step.computed[int(step.slots[0])] = L - int(step.lens[0])  # its last token has nothing after it
    expected = [
        int(step.tokens[slot, at]) if (at := int(step.computed[slot]) + 1 + k) < L else 0
        for i, slot in enumerate(step.slots.tolist())
        for k in range(len(step.span(i)))
    ]
    got = v2.prompt_logprob.get_prompt_logprobs_token_ids(
        step.total, step.starts, step.slots, step.computed, step.tokens
    )
    assert got.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grammar(step: Step, dtype: torch.dtype) -> None:
    """Three masks a request at most; those of rows that the step does not have do nothing."""
    cu, stride = cumulated(step.rng.integers(1, 4, size=step.n)), 3
    places = (
        ints(step.rng, 0, 1, 0) if not step.n else torch.from_numpy(step.rng.permutation(step.n * stride)[:5]).int()
    )
    masks = ints(step.rng, -(2**31), 2**31, (len(places), (V + 31) // 32))
    logits = step.logits(int(cu[-1])).to(dtype)
    expected = logits.tolist()
    for i, at in enumerate(places.tolist()):
        row = int(cu[at // stride]) + at % stride
        if row < int(cu[at // stride + 1]):
            for token in range(V):
                if not int(masks[i, token // 32]) >> token % 32 & 1:
                    expected[row][token] = -INF
    cpu_kernels.apply_grammar_bitmask(logits, *(one.numpy() for one in (places, cu, masks)), V, stride)
    assert logits.tolist() == expected


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("blocks", [[], [0], [4, 1]])
def test_new_blocks_of_the_cache_are_zeroed(v2: SimpleNamespace, segments: int, blocks: list[int]) -> None:
    """Only the page of a block: what lies between a page's end and the next block stays."""
    caches = [torch.full((5, 6), 7 + s, dtype=torch.int32) for s in range(segments)]
    pages = [6, 4, 1][:segments]
    expected = [[[7 + s] * 6 for _ in range(5)] for s in range(segments)]
    for s, page in enumerate(pages):
        for block in blocks:
            expected[s][block][:page] = [0] * page
    addresses = torch.tensor([cache.data_ptr() for cache in caches])
    strides, sizes = torch.full((segments,), 6), torch.tensor(pages)
    v2.utils._zero_kv_blocks_kernel[(1,)](addresses, strides, sizes, torch.tensor(blocks).long(), BLOCK_SIZE=8)
    assert [cache.tolist() for cache in caches] == expected


def test_a_step_takes_a_state_to_its_last_block(v2: SimpleNamespace, step: Step) -> None:
    state, accepted, columns, offsets = ints(step.rng, -1, 5, S), ints(step.rng, 0, 3, S), blank(S), blank(S)
    got = {"state": state, "accepted": accepted, "columns": columns, "offsets": offsets}
    expected = {name: values.tolist() for name, values in got.items()}
    for i, slot in step.requests():
        before, last = int(state[slot]), int(step.computed[slot]) + int(step.lens[i]) - 1
        expected["columns"][slot], expected["offsets"][slot] = before, max(int(accepted[slot]) - 1, 0)
        expected["state"][slot] = last // 4
        if before not in (-1, last // 4):
            expected["accepted"][slot] = 1
    v2.mamba_utils.preprocess_mamba_align_fused_kernel[(1,)](
        step.slots, state, step.computed, step.starts, accepted, columns, offsets, step.n,
        BLOCK_SIZE=8, MAMBA_BLOCK_SIZE=4,
    )  # fmt: skip
    assert {name: values.tolist() for name, values in got.items()} == expected


class States:
    """A convolution's state [blocks, 3 tokens, 2] and a recurrent one [blocks, 5] in pages that are longer, two groups.

    Where a convolution's channels come first, its state is [blocks, 2 channels, 3 tokens], of rows that are longer.
    """

    def __init__(self, seed: int, channels_first: bool) -> None:
        rng = np.random.default_rng(seed)
        self.first = channels_first
        self.conv = torch.from_numpy(rng.normal(size=(40, 2, 4) if channels_first else (40, 8))).float()
        self.recurrent = torch.from_numpy(rng.normal(size=(40, 6))).double()
        self.tables = [torch.from_numpy(rng.permutation(36).reshape(S, 4)).int() for _ in range(2)]

    def copy(self, slot: int, source: int, target: int) -> None:
        (a, b), (c, d) = (table[slot, [source, target]].tolist() for table in self.tables)
        if self.first:
            self.conv[b, :, :3] = self.conv[a, :, :3]
        else:
            self.conv[b, :6] = self.conv[a, :6]
        self.recurrent[d, :5] = self.recurrent[c, :5]

    def layout(self) -> list[Any]:
        """Of both: bytes of an element; elements of a token, of a state; tokens; group; channels; bytes of a row."""
        states = (self.conv, self.recurrent)
        channels = ([2, 0], [16, 0]) if self.first else ([0, 0], [0, 0])
        pages = [state.stride(0) * state.element_size() for state in states]
        return [
            torch.tensor([table.data_ptr() for table in self.tables]),
            4,
            torch.tensor([state.data_ptr() for state in states]),
            *map(torch.tensor, (pages, [4, 8], [2, 5], [3, 0], [0, 1], *channels)),
        ]

    def precopy(self, v2: SimpleNamespace, targets: Any, sources: Any, bias: Any, slots: Any) -> None:
        v2.mamba_utils.precopy_mamba_align_fused_kernel[(1,)](
            targets, sources, bias, *self.layout(), slots, len(slots),
            COPY_BLOCK_SIZE=1024, CONV_STATE_DIM_FIRST=self.first, HAS_IDX_MAPPING=True, TEMPORAL_TILES=1,
        )  # fmt: skip


@pytest.mark.parametrize("channels_first", [False, True])
def test_states_are_copied_to_the_block_of_a_step(v2: SimpleNamespace, step: Step, channels_first: bool) -> None:
    states, expected = (States(step.seed, channels_first) for _ in range(2))
    sources, targets = ints(step.rng, -1, 4, S), ints(step.rng, 0, 4, S)
    for _, slot in step.requests():
        if int(sources[slot]) not in (-1, int(targets[slot])):
            expected.copy(slot, int(sources[slot]), int(targets[slot]))
    slots = torch.cat([step.slots, step.slots.new_tensor([-1])])  # one that this worker doesn't have
    states.precopy(v2, targets, sources, torch.zeros(S, dtype=torch.int32), slots)
    assert torch.equal(states.conv, expected.conv)
    assert torch.equal(states.recurrent, expected.recurrent)


def test_drafts_of_a_recurrent_model_and_their_logits_are_refused(v2: SimpleNamespace) -> None:
    one, zeros = torch.ones(S, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(MissingKernelError, match="speculative decoding"):
        States(0, False).precopy(v2, one, 0 * one, one, torch.tensor([2]))
    with pytest.raises(MissingKernelError, match="speculative decoding"):
        after_step(v2, 2 * one, 8 * one, one, torch.tensor([2]))
    cache = torch.zeros(S, 1, V)
    with pytest.raises(MissingKernelError, match="speculative decoding"):
        v2.gumbel.gumbel_sample(torch.zeros(1, V), zeros, torch.ones(1), zeros, zeros, False, True, cache, zeros[0])


def after_step(v2: SimpleNamespace, accepted: Any, computed: Any, out: Any, slots: torch.Tensor) -> None:
    v2.mamba_utils.postprocess_mamba_fused_kernel[(1,)](
        accepted, None, None, computed, None, *States(0, False).layout(), out, slots, len(slots),
        block_size=4, COPY_BLOCK_SIZE=1024, CONV_STATE_DIM_FIRST=False, HAS_IDX_MAPPING=True,
        PRECOMPUTED_NEW_COMPUTED=True, TEMPORAL_TILES=1,
    )  # fmt: skip


def test_a_state_that_ends_its_block_stays_there(v2: SimpleNamespace) -> None:
    """Slots 0 to 2 have 8, 9 and 8 tokens, of blocks of 4; 2 isn't this worker's."""
    out = blank(3)
    after_step(v2, torch.ones(3, dtype=torch.int32), torch.tensor([8, 9, 8]), out, torch.tensor([1, -1, 0]))
    assert out.tolist() == [1, -7, -7]


def test_how_many_tokens_a_step_accepted_stands_in_its_slots(v2: SimpleNamespace) -> None:
    slots, out = torch.tensor([3, -1, 0]), blank(4)
    v2.mamba_hybrid._scatter_num_accepted_kernel[(3,)](slots, torch.tensor([0, 5, 2]), out)
    assert out.tolist() == [2, -7, -7, 1]
    v2.mamba_hybrid._fill_num_accepted_kernel[(3,)](slots, out, 4)
    assert out.tolist() == [4, -7, -7, 4]


def scale(output: list[float], factor: float, TWICE: bool = False) -> None:
    output[0] *= factor * (1 + TWICE)


def test_arguments_are_bound_by_name() -> None:
    def kernel(output_ptr: Any, inserted: Any, factor: Any, TWICE: Any, BLOCK_SIZE: Any) -> None:
        raise AssertionError

    def without(output_ptr: Any, TWICE: Any) -> None:
        raise AssertionError

    out, launch = [1.0], by_name("kernels.scale", kernel, scale)
    launch(out, 0, 3, TWICE=True, BLOCK_SIZE=8, num_warps=1)
    assert out == [6.0]
    launch(out, 0, 3, True, 8)
    assert out == [36.0]
    with pytest.raises(RuntimeError, match=r"vLLM [\d.]+.*: its kernel kernels\.scale has no parameter factor"):
        by_name("kernels.scale", without, scale)
