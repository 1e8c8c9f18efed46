"""vLLM's Model Runner V2 on a CPU without Triton: a torch or numpy function for each Triton kernel that text needs.

:func:`register` is a ``vllm.general_plugins`` entry point, so each process that vLLM starts has it. It uses vLLM's own
``register_kernels``, for vLLM 0.32 and 0.33.

A function takes what it needs of a kernel's parameters, by vLLM's names without ``_ptr``: releases insert parameters,
and the names stay. vLLM does not hand on the grid of a launch, so sizes come from the tensors. At one request a step
costs what its small operations cost: most functions work on ``tensor.numpy()``, which shares the tensor's memory.

Legend: N requests of the step, T its tokens, R rows of logits, S slots of request state, V vocabulary, G KV cache
groups, B blocks of a block table's row, L the longest sequence, D draft tokens.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import inspect
import itertools
import linecache
import sys
from collections.abc import Callable, Mapping
from types import FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from vllm.triton_utils.dispatcher import KernelOverride

NEG_INF = float("-inf")

Array: TypeAlias = npt.NDArray[np.integer]


# --- input_batch ------------------------------------------------------------------------------------------------------
def prepare_prefill_inputs(
    input_ids: torch.Tensor,
    next_prefill_tokens: torch.Tensor,
    num_lookahead: int,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    all_token_ids: torch.Tensor,
    prefill_lens: torch.Tensor,
    num_computed_tokens: torch.Tensor,
) -> None:
    """Copy the prompt tokens [S, L] of this step to ``input_ids`` [T], and those after it to [num_lookahead, S]."""
    slots = idx_mapping.numpy()
    prefills, computed = prefill_lens.numpy()[slots], num_computed_tokens.numpy()[slots]
    in_prefill = np.flatnonzero(computed < prefills)
    if not in_prefill.size:
        return  # decodes only: the usual step
    starts, ids, tokens = query_start_loc.numpy(), input_ids.numpy(), all_token_ids.numpy()
    for i in in_prefill.tolist():
        begin, end = int(starts[i]), int(starts[i + 1])
        first = int(computed[i])
        last = first + end - begin
        row = tokens[slots[i]]
        ids[begin:end] = row[first:last]
        if num_lookahead:
            ahead = row[last : min(last + num_lookahead, max(last, int(prefills[i])))]
            column = next_prefill_tokens.numpy()[:num_lookahead, slots[i]]
            column[len(ahead) :] = 0
            column[: len(ahead)] = ahead


def prepare_pos_seq_lens(
    pos: torch.Tensor,
    seq_lens: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    max_num_reqs: int,
) -> None:
    """Write the position of each token [T], and each request's length after the step [N], then 0 to the end."""
    n = idx_mapping.shape[0]
    starts = query_start_loc.numpy()[: n + 1]
    lens = starts[1:] - starts[:-1]
    computed = num_computed_tokens.numpy()[idx_mapping.numpy()]
    out = seq_lens.numpy()
    np.add(computed, lens, out=out[:n], casting="unsafe")
    out[n:max_num_reqs] = 0
    total = int(starts[-1])
    pos.numpy()[:total] = np.arange(total) + np.repeat(computed - starts[:-1], lens)


def combine_sampled_and_draft_tokens(
    input_ids: torch.Tensor,
    idx_mapping: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    prefill_len: torch.Tensor,
    draft_tokens: torch.Tensor,
    cu_num_logits: torch.Tensor,
    logits_indices: torch.Tensor,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
) -> None:
    """Write the index [R] of each token that gets logits; for decodes, put the last sampled token and drafts there."""
    n, slots = idx_mapping.shape[0], idx_mapping.numpy()
    ends = query_start_loc.numpy()[1 : n + 1]
    cu = cu_num_logits.numpy()[: n + 1]
    counts = cu[1:] - cu[:-1]
    starts = ends - counts
    ids, lens, prefills = input_ids.numpy(), seq_lens.numpy()[:n], prefill_len.numpy()[slots]
    total = logits_indices.shape[0]
    logits_indices.numpy()[:] = np.arange(total) + np.repeat(starts - cu[:-1], counts)
    generates = lens > prefills
    if NUM_NEW_SAMPLED_TOKENS > 0:
        on = generates & (lens - counts >= prefills)  # the other rows keep their prompt's tokens
        ids[starts[on]] = last_sampled_tokens.numpy().reshape(-1)[slots[on]]
    if total <= n * NUM_NEW_SAMPLED_TOKENS:
        return  # no drafts
    drafts = counts - NUM_NEW_SAMPLED_TOKENS
    for i in np.flatnonzero(generates & (drafts > 0)).tolist():
        ids[ends[i] - drafts[i] : ends[i]] = draft_tokens.numpy()[slots[i], : drafts[i]]


def get_num_sampled_and_rejected(
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    prefill_len: torch.Tensor,
) -> None:
    """Zero ``num_sampled`` [N] inside a prompt; ``num_rejected`` [N] is what the other requests did not accept."""
    n = idx_mapping.shape[0]
    chunked = seq_lens.numpy()[:n] < prefill_len.numpy()[idx_mapping.numpy()]
    sampled, cu = num_sampled.numpy()[:n], cu_num_logits.numpy()[: n + 1]
    sampled[chunked] = 0
    rejected = cu[1:] - cu[:-1] - sampled
    rejected[chunked] = 0
    num_rejected.numpy()[:n] = rejected


def post_update(
    idx_mapping: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    output_bin_counts: torch.Tensor | None,
    sampled_tokens: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    all_token_ids: torch.Tensor,
    total_len: torch.Tensor,
    draft_tokens: torch.Tensor | None = None,
    draft_tokens_out: torch.Tensor | None = None,
) -> None:
    """Add the sampled tokens [N, 1 + D] to the state of their slots. A slot of -1 is skipped."""
    n, slots, counts = idx_mapping.shape[0], idx_mapping.numpy(), num_sampled.numpy()
    rows: slice | Array = slice(n)
    if slots.min(initial=0) < 0:
        rows = np.flatnonzero(slots >= 0)
        slots = slots[rows]
    counts, tokens, lens = counts[rows], sampled_tokens.numpy()[rows], total_len.numpy()
    if draft_tokens is not None and draft_tokens_out is not None:
        draft_tokens_out.numpy()[slots] = draft_tokens.numpy()[rows]
    for i in range(int(counts.max(initial=0))):
        on: slice | npt.NDArray[np.bool_] = slice(None) if counts.min() > i else counts > i
        to, token = slots[on], tokens[on, i]
        all_token_ids.numpy()[to, lens[to] + i] = token
        last_sampled_tokens.numpy().reshape(-1)[to] = token
        if output_bin_counts is not None:
            output_bin_counts.numpy()[to, token] += 1
    lens[slots] += counts
    delta = -num_rejected.numpy()[rows]
    if query_start_loc is not None:
        starts = query_start_loc.numpy()[: n + 1]
        delta += (starts[1:] - starts[:-1])[rows]
    num_computed_tokens.numpy()[slots] += delta


def post_update_num_computed_tokens(
    idx_mapping: torch.Tensor, num_computed_tokens: torch.Tensor, query_start_loc: torch.Tensor
) -> None:
    """Add each request's tokens of this step to ``num_computed_tokens`` [S]."""
    starts = query_start_loc.numpy()[: idx_mapping.shape[0] + 1]
    num_computed_tokens.numpy()[idx_mapping.numpy()] += starts[1:] - starts[:-1]


def expand_idx_mapping(
    idx_mapping: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    cu_num_logits: torch.Tensor,
) -> None:
    """Repeat each request's slot for its rows of logits [R], and number these rows from 0 within the request [R]."""
    cu = cu_num_logits.numpy()[: idx_mapping.shape[0] + 1]
    counts = cu[1:] - cu[:-1]
    expanded_idx_mapping.numpy()[:] = np.repeat(idx_mapping.numpy(), counts)
    expanded_local_pos.numpy()[:] = np.arange(expanded_local_pos.shape[0]) - np.repeat(cu[:-1], counts)


# --- buffer_utils, block_table: these kernels get the addresses of int32 tables, not tensors --------------------------
@functools.lru_cache(maxsize=1024)
def _int32_at(address: int, rows: int, width: int) -> Array:
    """Return the int32 array [rows, width] that starts at an address. It owns nothing, so it can be kept."""
    cells = (ctypes.c_int32 * (rows * width)).from_address(address)
    return np.ctypeslib.as_array(cells).reshape(rows, width)


def apply_write(
    output: torch.Tensor,
    output_stride: torch.Tensor | int,
    write_indices: torch.Tensor,
    write_starts: torch.Tensor,
    write_contents: torch.Tensor,
    write_cu_lens: torch.Tensor,
    write_group_ids: torch.Tensor | None,
    MULTI_GROUP: bool = False,
) -> None:
    """Write pieces of ``write_contents``: piece i into row ``write_indices[i]`` from column ``write_starts[i]`` on.

    ``output`` is the table [S, B] or [S]; with MULTI_GROUP it holds the addresses of G tables, and the strides theirs.
    """
    rows, firsts, ends = write_indices.tolist(), write_starts.tolist(), write_cu_lens.tolist()
    contents = write_contents.numpy()
    begin = 0
    if MULTI_GROUP:
        assert isinstance(output_stride, torch.Tensor) and write_group_ids is not None
        addresses, strides = output.tolist(), output_stride.tolist()
        for row, first, end, group in zip(rows, firsts, ends, write_group_ids.tolist(), strict=True):
            table = _int32_at(addresses[group], 1 + row, strides[group])
            table[row, first : first + end - begin] = contents[begin:end]
            begin = end
        return
    table = output.numpy()
    for row, first, end in zip(rows, firsts, ends, strict=True):
        if table.ndim == 1:
            table[row + first : row + first + end - begin] = contents[begin:end]
        else:
            table[row, first : first + end - begin] = contents[begin:end]
        begin = end


def gather_block_tables(
    batch_idx_to_req_idx: torch.Tensor,
    src_block_table_ptrs: torch.Tensor,
    dst_block_table_ptrs: torch.Tensor,
    block_table_strides: torch.Tensor,
    num_blocks: torch.Tensor,
    num_reqs: int,
    num_computed_tokens: torch.Tensor | None = None,
    sliding_window_reach: torch.Tensor | None = None,
    block_sizes: torch.Tensor | None = None,
    MASK_SLIDING_WINDOW: bool = False,
) -> None:
    """Copy the requests' rows of each group's table [S, B] to the first N rows of the step's own table [S, B].

    Blocks that a sliding window has left behind become block 0. Rows after N keep what they hold: nothing reads them
    where there are no CUDA graphs.
    """
    slots, counts, max_reqs = batch_idx_to_req_idx.numpy(), num_blocks.numpy(), num_blocks.shape[1]
    sources, targets = src_block_table_ptrs.tolist(), dst_block_table_ptrs.tolist()
    for group, stride in enumerate(block_table_strides.tolist()):
        # Cells after a row's own blocks are never read, so all rows are as wide as the widest.
        width = int(counts[group, slots].max(initial=0))
        if not width:
            continue
        rows = _int32_at(sources[group], max_reqs, stride)[slots, :width]
        if MASK_SLIDING_WINDOW:
            assert num_computed_tokens is not None and sliding_window_reach is not None and block_sizes is not None
            reach = int(sliding_window_reach[group])
            if reach > 0:
                left = np.maximum(num_computed_tokens.numpy()[slots] - reach, 0) // int(block_sizes[group])
                rows[np.arange(width) < left[:, None]] = 0
        _int32_at(targets[group], max_reqs, stride)[:num_reqs, :width] = rows


def compute_slot_mappings(
    max_num_tokens: int,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    pos: torch.Tensor,
    block_table_ptrs: torch.Tensor,
    block_table_strides: torch.Tensor,
    block_sizes: torch.Tensor,
    slot_mapping_enabled: torch.Tensor,
    slot_mappings: torch.Tensor,
    CP_SIZE: int,
    PAD_ID: int,
) -> None:
    """Write where in each group's KV cache a token goes [G, max_num_tokens]: PAD_ID after T, and for a slot of -1."""
    if CP_SIZE != 1:
        raise ValueError(f"CP_SIZE={CP_SIZE}: torchrl_moe's CPU kernels do not split a context over ranks")
    n, slots = idx_mapping.shape[0], idx_mapping.numpy()
    starts = query_start_loc.numpy()[: n + 1]
    total = int(starts[-1])
    out, positions = slot_mappings.numpy(), pos.numpy()[:total]
    out[:, total:max_num_tokens] = PAD_ID
    of_token = np.repeat(slots, starts[1:] - starts[:-1])
    rows = int(slots.max(initial=-1)) + 1
    sizes, tables, strides = block_sizes.tolist(), block_table_ptrs.tolist(), block_table_strides.tolist()
    for group, enabled in enumerate(slot_mapping_enabled.tolist()):
        if not enabled or not rows:
            out[group, :total] = PAD_ID
            continue
        size = sizes[group]
        block = positions // size
        # A dummy request (slot -1) reads the last row, which is there, and is overwritten below.
        ids = _int32_at(tables[group], rows, strides[group])[of_token, block]
        out[group, :total] = ids * np.int64(size) + (positions - block * size)
        if slots.min() < 0:
            out[group, :total][of_token < 0] = PAD_ID


def zero_kv_blocks(
    seg_addrs: torch.Tensor, seg_block_strides: torch.Tensor, seg_page_sizes: torch.Tensor, block_ids: torch.Tensor
) -> None:
    """Zero new blocks [N] in each segment of the cache, given its address, and stride and size of a block in int32."""
    blocks = block_ids.tolist()
    segments = zip(seg_addrs.tolist(), seg_block_strides.tolist(), seg_page_sizes.tolist(), strict=True)
    for address, stride, size in segments:
        for block in blocks:
            ctypes.memset(address + 4 * block * stride, 0, 4 * size)


# --- mamba: a hybrid model's states lie in blocks of the cache, too ---------------------------------------------------
def preprocess_mamba_align(
    idx_mapping: torch.Tensor,
    state_idx: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    src_col: torch.Tensor,
    src_off: torch.Tensor,
    num_reqs: int,
    MAMBA_BLOCK_SIZE: int,
) -> None:
    """Write each request's block before the step, and advance ``state_idx`` [S] to the block that the step ends in."""
    slots = idx_mapping.numpy()[:num_reqs]
    now, accepted = state_idx.numpy(), num_accepted_tokens.numpy()
    before = now[slots]
    src_col.numpy()[slots] = before
    src_off.numpy()[slots] = np.maximum(accepted[slots] - 1, 0)
    starts = query_start_loc.numpy()[: num_reqs + 1]
    ends = num_computed_tokens.numpy()[slots] + starts[1:] - starts[:-1]
    now[slots] = after = (ends + MAMBA_BLOCK_SIZE - 1) // MAMBA_BLOCK_SIZE - 1
    accepted[slots[(before >= 0) & (before != after)]] = 1


def precopy_mamba_align(
    mamba_state_idx: torch.Tensor,
    src_col: torch.Tensor,
    token_bias: torch.Tensor,
    block_table_ptrs: torch.Tensor,
    block_table_stride_req: int,
    state_base_addrs: torch.Tensor,
    state_block_strides: torch.Tensor,
    state_elem_sizes: torch.Tensor,
    state_inner_sizes: torch.Tensor,
    state_conv_widths: torch.Tensor,
    state_group_indices: torch.Tensor,
    state_dim_row_count: torch.Tensor,
    state_dim_row_stride: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_reqs: int,
    CONV_STATE_DIM_FIRST: bool,
) -> None:
    """Copy the states of requests that enter another block to it; one column of a state is a block of its layer."""
    slots = idx_mapping.numpy()[:num_reqs]
    slots = slots[slots >= 0]
    sources, targets = src_col.numpy()[slots], mamba_state_idx.numpy()[slots]
    moved = (sources >= 0) & (sources != targets)
    if not moved.any():
        return  # the usual step
    if token_bias.numpy()[slots[moved]].any():
        raise MissingKernelError("states of accepted drafts have no CPU version: speculative decoding")
    states = zip(
        *(
            one.tolist()
            for one in (
                state_base_addrs,
                state_block_strides,
                state_elem_sizes,
                state_inner_sizes,
                state_conv_widths,
                state_group_indices,
                state_dim_row_count,
                state_dim_row_stride,
            )
        ),
        strict=True,
    )
    tables = block_table_ptrs.tolist()
    moves = list(zip(*(one[moved].tolist() for one in (slots, sources, targets)), strict=True))
    for base, stride, element, inner, width, group, rows, row_stride in states:
        for slot, source, target in moves:
            table = _int32_at(tables[group] + 4 * slot * block_table_stride_req, 1, block_table_stride_req)[0]
            there, here = base + int(table[source]) * stride, base + int(table[target]) * stride
            if CONV_STATE_DIM_FIRST and width:
                for row in range(rows):
                    ctypes.memmove(here + row * row_stride, there + row * row_stride, width * element)
            else:
                ctypes.memmove(here, there, inner * element * (width or 1))


def postprocess_mamba(
    num_accepted_tokens: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    num_accepted_tokens_out: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_reqs: int,
    block_size: int,
    PRECOMPUTED_NEW_COMPUTED: bool,
) -> None:
    """Refuse accepted drafts, whose states it would copy; without drafts a step's last state is where it belongs."""
    slots = idx_mapping.numpy()[:num_reqs]
    slots = slots[slots >= 0]
    computed, accepted = num_computed_tokens.numpy()[slots], num_accepted_tokens.numpy()[slots]
    aligned = computed // block_size * block_size
    full = aligned >= computed - accepted + 1  # a block ended among the accepted tokens
    if not PRECOMPUTED_NEW_COMPUTED or (accepted[full] != 1).any():
        raise MissingKernelError("states of accepted drafts have no CPU version: speculative decoding")
    num_accepted_tokens_out.numpy()[slots[full]] = 1


def scatter_num_accepted(idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_accepted: torch.Tensor) -> None:
    """Write the number of tokens that each request got [S], at least 1."""
    slots = idx_mapping.numpy()
    on = slots >= 0
    num_accepted.numpy()[slots[on]] = np.maximum(num_sampled.numpy()[: len(slots)][on], 1)


def fill_num_accepted(idx_mapping: torch.Tensor, num_accepted: torch.Tensor, num_sampled: int) -> None:
    """Write the same number of tokens for each request [S]."""
    slots = idx_mapping.numpy()
    num_accepted.numpy()[slots[slots >= 0]] = num_sampled


# --- sample: logits are float32 where vLLM changes them; elsewhere they may be of the model's dtype -------------------
def temperature(logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, temperature: torch.Tensor) -> None:
    """Divide each row of the logits [R, V] by its request's temperature [S]; 0 is greedy, and changes nothing."""
    of_row = temperature.numpy()[expanded_idx_mapping.numpy()]
    rows = np.flatnonzero((of_row != 0.0) & (of_row != 1.0))
    if rows.size:
        divisor = torch.from_numpy(of_row[rows]).unsqueeze(1)
        if rows.size == of_row.size:
            logits.div_(divisor)
        else:
            index = torch.from_numpy(rows)
            logits[index] = logits[index] / divisor


_LOW_32 = 0xFFFFFFFF
_HIGH_DOMAIN = 0x9E3779B9
_DRAFT_SALT = 1 << 30


def _rotate(value: Any, bits: int) -> Any:  # Any: an int, or an array of uint64
    return (value << bits | value >> 32 - bits) & _LOW_32


def _scramble(key: Any) -> Any:
    return _rotate(key * 0xCC9E2D51 & _LOW_32, 15) * 0x1B873593 & _LOW_32


def _hash_of_request(seed: Any, position: Any, domain: int) -> Any:
    """Return MurmurHash3's state after a seed's 64 bits and a position's 32; all are Python ints, or uint64 arrays."""
    state: Any = domain
    for key in (seed & _LOW_32, seed >> 32 & _LOW_32, position & _LOW_32):
        state = _rotate(state ^ _scramble(key), 13) * 5 + 0xE6546B64 & _LOW_32
    return state


@functools.lru_cache(maxsize=4)
def _scrambled_tokens(vocab_size: int) -> Array:
    """Return the part of the hash that depends on the token only, uint32 [V]."""
    return _scramble(np.arange(vocab_size, dtype=np.uint64)).astype(np.uint32)


def _murmur3(seeds: Array, positions: Array, vocab_size: int, domain: int = 0) -> Array:
    """Return vLLM's hash of (seed, position, token) bit for bit, uint32 [R, V], for int64 [R] and [R]."""
    if len(seeds) == 1:  # ints: a third of the time of small arrays
        state = np.uint32(_hash_of_request(int(seeds[0]), int(positions[0]), domain))
        hashed = np.bitwise_xor(_scrambled_tokens(vocab_size), state)[None]
    else:
        states = _hash_of_request(seeds.view(np.uint64), positions.view(np.uint64), domain)
        hashed = states.astype(np.uint32)[:, None] ^ _scrambled_tokens(vocab_size)
    shifted = hashed >> np.uint32(19)
    hashed <<= np.uint32(13)
    hashed |= shifted
    hashed *= np.uint32(5)
    hashed += np.uint32(0xE6546B64)
    hashed ^= np.uint32(16)  # the length of what was hashed, in bytes
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        np.right_shift(hashed, np.uint32(shift), out=shifted)
        hashed ^= shifted
        if factor != 1:
            hashed *= np.uint32(factor)
    return hashed


def _gumbel_noise(seeds: Array, positions: Array, vocab_size: int, fp64: bool) -> torch.Tensor:
    """Return Gumbel noise [R, V], float32 or float64."""
    low = _murmur3(seeds, positions, vocab_size)
    if fp64:
        high = _murmur3(seeds, positions, vocab_size, _HIGH_DOMAIN)
        bits = (high.astype(np.uint64) << np.uint64(32) | low) >> np.uint64(11)
        u64 = torch.from_numpy((bits.astype(np.float64) + 0.5) * 2.0**-53)
        return u64.clamp_max_(1.0 - 2.0**-53).log_().neg_().log_().neg_()  # the largest would round to 1
    # Rounded to float32 once, so that u near 0, where the large noise is, keeps all 32 bits.
    u = low.astype(np.float64)
    u += 0.5
    u *= 2.0**-32
    noise = torch.from_numpy(u.astype(np.float32))
    # u can round to 1. Unbounded, the noise would be -inf, and a row's only kept token would lose to token 0.
    return noise.neg_().log1p_().clamp_min_(-16.63).neg_().log_().neg_()


def gumbel_sample(
    local_argmax: torch.Tensor,
    local_max: torch.Tensor,
    logits_cache: torch.Tensor | None,
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    seeds: torch.Tensor,
    pos: torch.Tensor,
    temp: torch.Tensor,
    vocab_size: int,
    IS_DRAFTING: bool,
    APPLY_TEMPERATURE: bool,
    USE_FP64: bool,
) -> None:
    """Sample a token for each row of the logits [R, V]: the largest of logits and Gumbel noise; greedily at 0.

    vLLM lays out a best token and its value for each block of the vocabulary, [R, blocks], and takes the best of
    these. All but the first are -inf here.
    """
    if logits_cache is not None:
        raise MissingKernelError(
            "vLLM's cache of draft logits has no CPU version in torchrl_moe: no speculative decoding"
        )
    slots = expanded_idx_mapping.numpy()
    of_row = temp.numpy()[slots]
    if slots.min(initial=0) < 0:
        of_row[slots < 0] = 0.0  # padding
    scores = logits.float()
    sampled = np.flatnonzero(of_row)
    if sampled.size:
        positions = pos.numpy()[sampled].astype(np.int64, copy=False)
        if IS_DRAFTING:
            positions = positions + _DRAFT_SALT
        noise = _gumbel_noise(seeds.numpy()[slots[sampled]], positions, vocab_size, USE_FP64)
        index = None if sampled.size == slots.size else torch.from_numpy(sampled)
        chosen = scores if index is None else scores[index]
        if APPLY_TEMPERATURE:
            chosen = chosen / torch.from_numpy(of_row[sampled]).unsqueeze(1)
        noise += chosen
        scores = noise if index is None else scores.to(noise.dtype).index_copy(0, index, noise)
    values, best = scores.numpy(), local_max.numpy()
    best[:, 1:] = NEG_INF
    best[:, 0] = values.max(axis=1)
    local_argmax.numpy()[:, 0] = values.argmax(axis=1)


def topk_log_softmax(output: torch.Tensor, logits: torch.Tensor, topk_ids: torch.Tensor) -> None:
    """Write the log-probs [R, K], float32, of the tokens ``topk_ids`` [R, K] under the logits [R, V]."""
    torch.gather(logits.float().log_softmax(dim=1), 1, topk_ids, out=output)


def ranks(output: torch.Tensor, logits: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Write how many logits of each row [R, V] are at least the token's [R]: 1 for the largest, V for one at -inf."""
    torch.sum(logits >= logits.gather(1, token_ids.long().unsqueeze(1)), dim=1, out=output)


def fill_logprob_token_ids(
    out_token_ids: torch.Tensor,
    out_valid_mask: torch.Tensor,
    sampled_token_ids: torch.Tensor,
    topk_indices: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    num_per_req_token_ids: torch.Tensor,
    per_req_token_ids: torch.Tensor,
    NUM_TOPK: int,
) -> None:
    """Write which tokens [R, 1 + C] get log-probs: the sampled one, then the request's own, or else the top ones."""
    ids, valid = out_token_ids.numpy(), out_valid_mask.numpy()
    ids[:, 0] = sampled_token_ids.numpy()
    valid[:, 0] = True
    slots = expanded_idx_mapping.numpy()
    for i, (slot, count) in enumerate(zip(slots, num_per_req_token_ids.numpy()[slots], strict=True)):
        source = per_req_token_ids.numpy()[slot, :count] if count else topk_indices.numpy()[i, :NUM_TOPK]
        ids[i, 1 : 1 + len(source)] = source
        valid[i, 1 : 1 + len(source)] = True


def min_p(logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, min_p: torch.Tensor) -> None:
    """Mask what is less probable than ``min_p`` [S] times the row's best, in the logits [R, V]; 0 masks nothing."""
    log_share = min_p[expanded_idx_mapping].float().log()  # log 0 is -inf, and nothing is below
    threshold = logits.amax(dim=1).float() + log_share
    logits.masked_fill_(logits < threshold.unsqueeze(1), NEG_INF)


def compact_sampling_mask(
    logits: torch.Tensor,
    cu_num_logits: torch.Tensor,
    num_sampled_tokens: torch.Tensor,
    token_ids: torch.Tensor,
    packed_mask: torch.Tensor,
    counts: torch.Tensor,
    max_num_kept: int,
    ROWS_PER_REQUEST: int,
) -> None:
    """Write for each sampled token which ids were kept (a finite logit), for requests x ROWS_PER_REQUEST rows.

    ``counts`` says how many; ``token_ids`` [rows, max_num_kept] are the first of them; ``packed_mask`` [rows, V / 8]
    has a bit for each entry of the vocabulary. The rows of other tokens get the count 0.
    """
    sampled = num_sampled_tokens.numpy()
    place = np.arange(ROWS_PER_REQUEST)
    active = place < sampled[:, None]
    sources = (cu_num_logits.numpy()[: len(sampled), None] + place)[active]
    out = np.flatnonzero(active)
    values = logits.float().numpy()
    keep = np.isfinite(values if len(sources) == len(values) else values[sources])  # if all are sampled, in order
    packed_mask.numpy()[out] = np.packbits(keep, axis=1, bitorder="little")
    ids, kept_counts = token_ids.numpy(), counts.numpy()
    kept_counts[:] = 0
    for to, kept in zip(out.tolist(), keep, strict=True):
        tokens = np.flatnonzero(kept)
        kept_counts[to] = len(tokens)
        tokens = tokens[:max_num_kept]
        ids[to, : len(tokens)] = tokens


def _unpack(packed: Array, vocab_size: int) -> Array:
    """Return the bits of int32 numbers [..., V / 32] as bool [..., V]."""
    return np.unpackbits(packed.view(np.uint8), axis=-1, bitorder="little")[..., :vocab_size].view(np.bool_)


def penalties(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    token_ids: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    repetition_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
    prompt_bin_mask: torch.Tensor,
    output_bin_counts: torch.Tensor,
    vocab_size: int,
) -> None:
    """Penalise, in the logits [R, V], tokens of answers, [S, V], and for repetition of prompts, bits [S, V / 32]."""
    slots = expanded_idx_mapping.numpy()
    repetition, frequency, presence = (
        penalty.numpy()[slots] for penalty in (repetition_penalty, frequency_penalty, presence_penalty)
    )
    values, drafts, befores = logits.numpy(), token_ids.numpy(), expanded_local_pos.numpy()
    for i in np.flatnonzero((repetition != 1.0) | (frequency != 0.0) | (presence != 0.0)).tolist():
        row, count = values[i], output_bin_counts.numpy()[slots[i], :vocab_size]
        if before := int(befores[i]):  # drafts at earlier rows of the same request
            count = count + np.bincount(drafts[i - before + 1 : i + 1], minlength=vocab_size)
        seen = count > 0
        if repetition[i] != 1.0:
            known = seen | _unpack(prompt_bin_mask.numpy()[slots[i]], vocab_size)
            row *= np.where(known, np.where(row > 0, np.float32(1.0) / repetition[i], repetition[i]), np.float32(1.0))
        row -= frequency[i] * count.astype(np.float32)
        row -= presence[i] * seen.astype(np.float32)


def bincount(
    expanded_idx_mapping: torch.Tensor,
    all_token_ids: torch.Tensor,
    prompt_len: torch.Tensor,
    prefill_len: torch.Tensor,
    prompt_bin_mask: torch.Tensor,
    output_bin_counts: torch.Tensor,
) -> None:
    """Add prompts' tokens to bits [S, V / 32], and count those of answers that were computed before [S, V]."""
    tokens, masks, counts = all_token_ids.numpy(), prompt_bin_mask.numpy(), output_bin_counts.numpy()
    slots = expanded_idx_mapping.numpy()
    prompts, prefills = prompt_len.numpy()[slots].tolist(), prefill_len.numpy()[slots].tolist()
    for slot, prompt, end in zip(slots.tolist(), prompts, prefills, strict=True):
        bits = np.zeros(masks.shape[1] * 32, dtype=np.bool_)
        bits[tokens[slot, :prompt]] = True
        masks[slot] |= np.packbits(bits, bitorder="little").view(np.int32)
        counts[slot] += np.bincount(tokens[slot, prompt:end], minlength=counts.shape[1]).astype(np.int32)


def bias(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    num_allowed_token_ids: torch.Tensor,
    allowed_token_ids: torch.Tensor,
    num_logit_bias: torch.Tensor,
    bias_token_ids: torch.Tensor,
    bias: torch.Tensor,
    pos: torch.Tensor,
    min_lens: torch.Tensor,
    num_stop_token_ids: torch.Tensor,
    restore_when_all_masked: torch.Tensor,
    stop_token_ids: torch.Tensor,
    CHECK_ALL_MASKED_ROWS: bool,
) -> None:
    """Change the logits [R, V]: mask all but allowed tokens, add biases, mask the stop tokens of too short answers.

    Where that leaves no token, a request that asks for it gets its stop tokens back.
    """
    slots = expanded_idx_mapping.numpy()
    allowed, biased, stops = (
        count.numpy()[slots].tolist() for count in (num_allowed_token_ids, num_logit_bias, num_stop_token_ids)
    )
    too_short = (pos.numpy()[: len(slots)] + 1 < min_lens.numpy()[slots]).tolist()
    for i, (slot, row) in enumerate(zip(slots.tolist(), logits.numpy(), strict=True)):
        if allowed[i]:
            ids = allowed_token_ids.numpy()[slot, : allowed[i]]
            kept = row[ids]
            row.fill(NEG_INF)
            row[ids] = kept
        if biased[i]:
            row[bias_token_ids.numpy()[slot, : biased[i]]] += bias.numpy()[slot, : biased[i]]
        if stops[i] and too_short[i]:
            ids = stop_token_ids.numpy()[slot, : stops[i]]
            saved = row[ids]
            row[ids] = NEG_INF
            if CHECK_ALL_MASKED_ROWS and restore_when_all_masked.numpy()[slot] and row.max() == NEG_INF:
                row[ids] = np.where(np.isfinite(saved), saved, NEG_INF)


def bad_words(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    bad_word_token_ids: torch.Tensor,
    bad_word_offsets: torch.Tensor,
    num_bad_words: torch.Tensor,
    all_token_ids: torch.Tensor,
    prompt_len: torch.Tensor,
    total_len: torch.Tensor,
    input_ids: torch.Tensor,
    expanded_local_pos: torch.Tensor,
) -> None:
    """Mask, in the logits [R, V], the last token of each bad word whose other tokens the answer ends with."""
    values, drafts = logits.numpy(), input_ids.numpy()
    slots = expanded_idx_mapping.numpy()
    counts, aheads = num_bad_words.numpy()[slots].tolist(), expanded_local_pos.tolist()
    for i, slot in enumerate(slots.tolist()):
        if not counts[i]:
            continue
        offsets = bad_word_offsets.numpy()[slot, : counts[i] + 1].tolist()
        tokens = bad_word_token_ids.numpy()[slot, : offsets[-1]].tolist()
        words = [tokens[a:b] for a, b in itertools.pairwise(offsets)]
        end = int(total_len[slot])
        begin = max(int(prompt_len[slot]), end - max(map(len, words)))
        answer = all_token_ids.numpy()[slot, begin:end].tolist()
        if aheads[i]:
            answer += drafts[i - aheads[i] + 1 : i + 1].tolist()
        for *before, last in words:
            if not before or answer[-len(before) :] == before:
                values[i, last] = NEG_INF


def prompt_logprobs_token_ids(
    prompt_logprobs_token_ids: torch.Tensor,
    query_start_loc: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    all_token_ids: torch.Tensor,
) -> None:
    """Write the token after each token of the step [T]: the one whose log-prob is asked for."""
    slots, starts = idx_mapping.numpy(), query_start_loc.tolist()
    out, tokens = prompt_logprobs_token_ids.numpy(), all_token_ids.numpy()
    for i, (slot, computed) in enumerate(zip(slots.tolist(), num_computed_tokens.numpy()[slots].tolist(), strict=True)):
        begin, end = starts[i], starts[i + 1]
        following = tokens[slot, computed + 1 : computed + 1 + end - begin]
        out[begin : begin + len(following)] = following
        out[begin + len(following) : end] = 0  # the last place of a full row has nothing after it


def apply_grammar_bitmask(
    logits: torch.Tensor,
    logits_indices: torch.Tensor,
    cu_num_logits: torch.Tensor,
    bitmask: torch.Tensor,
    vocab_size: int,
    MASK_STRIDE: int,
) -> None:
    """Mask, in the logits [R, V], the ids whose bit is 0.

    ``bitmask`` is [M, V / 32]. ``logits_indices`` [M] are request x MASK_STRIDE + row of the request; rows that the
    step does not have are passed over.
    """
    request, place = np.divmod(logits_indices.numpy(), MASK_STRIDE)
    cu = cu_num_logits.numpy()
    first = cu[request]
    on = place < cu[request + 1] - first
    rows = torch.from_numpy((first + place)[on].astype(np.int64))
    masked = torch.from_numpy(~_unpack(bitmask.numpy()[on], vocab_size))
    logits[rows] = logits[rows].masked_fill(masked, NEG_INF)


_V2 = "vllm.v1.worker.gpu"
KERNELS: Mapping[str, Callable[..., None]] = MappingProxyType(
    {
        f"{_V2}.input_batch._prepare_prefill_inputs_kernel": prepare_prefill_inputs,
        f"{_V2}.input_batch._prepare_pos_seq_lens_kernel": prepare_pos_seq_lens,
        f"{_V2}.input_batch._combine_sampled_and_draft_tokens_kernel": combine_sampled_and_draft_tokens,
        f"{_V2}.input_batch._get_num_sampled_and_rejected_kernel": get_num_sampled_and_rejected,
        f"{_V2}.input_batch._post_update_kernel": post_update,
        f"{_V2}.input_batch._post_update_num_computed_tokens_kernel": post_update_num_computed_tokens,
        f"{_V2}.input_batch._expand_idx_mapping_kernel": expand_idx_mapping,
        f"{_V2}.buffer_utils._apply_write_kernel": apply_write,
        f"{_V2}.block_table._gather_block_tables_kernel": gather_block_tables,
        f"{_V2}.block_table._compute_slot_mappings_kernel": compute_slot_mappings,
        "vllm.v1.worker.utils._zero_kv_blocks_kernel": zero_kv_blocks,
        "vllm.v1.worker.mamba_utils.preprocess_mamba_align_fused_kernel": preprocess_mamba_align,
        "vllm.v1.worker.mamba_utils.precopy_mamba_align_fused_kernel": precopy_mamba_align,
        "vllm.v1.worker.mamba_utils.postprocess_mamba_fused_kernel": postprocess_mamba,
        f"{_V2}.model_states.mamba_hybrid._scatter_num_accepted_kernel": scatter_num_accepted,
        f"{_V2}.model_states.mamba_hybrid._fill_num_accepted_kernel": fill_num_accepted,
        f"{_V2}.sample.gumbel._temperature_kernel": temperature,
        f"{_V2}.sample.gumbel._gumbel_sample_kernel": gumbel_sample,
        f"{_V2}.sample.logprob._topk_log_softmax_kernel": topk_log_softmax,
        f"{_V2}.sample.logprob._ranks_kernel": ranks,
        f"{_V2}.sample.logprob._fill_logprob_token_ids_kernel": fill_logprob_token_ids,
        f"{_V2}.sample.min_p._min_p_kernel": min_p,
        f"{_V2}.sample.output._compact_sampling_mask_kernel": compact_sampling_mask,
        f"{_V2}.sample.penalties._penalties_kernel": penalties,
        f"{_V2}.sample.penalties._bincount_kernel": bincount,
        f"{_V2}.sample.logit_bias._bias_kernel": bias,
        f"{_V2}.sample.bad_words._bad_words_kernel": bad_words,
        f"{_V2}.sample.prompt_logprob._prompt_logprobs_token_ids_kernel": prompt_logprobs_token_ids,
        f"{_V2}.structured_outputs._apply_grammar_bitmask_kernel": apply_grammar_bitmask,
    }
)
"""vLLM's name of each kernel -> our function."""


class MissingKernelError(NotImplementedError):
    """A Triton kernel of vLLM was launched that has no CPU version here."""


def by_name(name: str, kernel: Callable[..., object], function: Callable[..., None]) -> Callable[..., None]:
    """Return what launches ``function`` in the place of the kernel ``name``, with the arguments that it has names
    for.
    """
    names = [n.removesuffix("_ptr") for n in getattr(kernel, "arg_names", None) or inspect.signature(kernel).parameters]
    wanted = inspect.signature(function).parameters
    missing = [n for n, parameter in wanted.items() if parameter.default is parameter.empty and n not in names]
    if missing:
        raise RuntimeError(
            f"vLLM {_vllm_version()}: its kernel {name} has no parameter {', '.join(missing)}, which torchrl_moe's CPU "
            "version needs. Use vLLM 0.32 or 0.33."
        )
    places = [(i, n) for i, n in enumerate(names) if n in wanted]

    def launch(*args: object, **constants: object) -> None:
        given = {n: args[i] for i, n in places if i < len(args)}
        for constant, value in constants.items():
            if constant in wanted:
                given[constant] = value
        function(**given)

    launch.__name__ = function.__name__
    return launch


def _vllm_version() -> str:
    import vllm

    return str(vllm.__version__)


def _kernel(name: str) -> Callable[..., object]:
    """Return vLLM's kernel of that name."""
    module, _, attribute = name.rpartition(".")
    kernel = getattr(importlib.import_module(module), attribute, None)
    if kernel is None:
        raise RuntimeError(f"vLLM {_vllm_version()} has no kernel {name}. Use vLLM 0.32 or 0.33.")
    return kernel


def _refusal(name: str) -> Callable[..., NoReturn]:
    """Return what raises when the kernel ``name`` is launched."""

    def refuse(*args: object, **constants: object) -> NoReturn:
        raise MissingKernelError(
            f"vLLM's Triton kernel {name} has no CPU version in torchrl_moe (it was launched with "
            f"{len(args) + len(constants)} arguments). Leave out the request's or the engine's option that needs it, "
            "or run on a GPU."
        )

    refuse.__name__ = name.rpartition(".")[2]
    return refuse


def _kernels_without_triton(triton: Any) -> dict[str, Callable[..., NoReturn]]:
    """Return the refusals of all kernels in vLLM's modules that are imported.

    vLLM's placeholder of Triton hands on a decorated function as it is, so the line of its decorator tells it.
    """
    found = {}
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("vllm.") or vars(module).get("triton") is not triton:
            continue
        for attribute, value in vars(module).items():
            if isinstance(value, FunctionType) and value.__module__ == module_name:
                code = value.__code__
                if linecache.getline(code.co_filename, code.co_firstlineno).lstrip().startswith("@triton."):
                    found[f"{module_name}.{attribute}"] = _refusal(f"{module_name}.{attribute}")
    return found


def _refuse_later_kernels(triton: Any) -> None:
    """Let kernels of modules that are imported from now on refuse, too."""
    from vllm.triton_utils.dispatcher import KernelOverride

    decorate = triton.jit

    def stand_in(function: Callable[..., object]) -> KernelOverride:
        return KernelOverride(function, _refusal(f"{function.__module__}.{function.__qualname__}"))

    def jit(*args: Callable[..., object], **options: object) -> object:
        decorated = decorate(*args, **options)
        return stand_in(decorated) if args else lambda function: stand_in(decorated(function))

    triton.jit = jit


@functools.cache
def install() -> None:
    """Replace the kernels in this process, once: those of :data:`KERNELS` by ours, others by an error that names
    them.
    """
    import vllm.v1.worker.cpu.shm  # noqa: F401 - first: the kernels' modules import by name what it replaces
    import vllm.v1.worker.gpu_worker as worker
    from vllm.triton_utils import triton
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.utils.math_utils import next_power_of_2

    ours = {name: by_name(name, _kernel(name), function) for name, function in KERNELS.items()}
    register_kernels({**_kernels_without_triton(triton), **ours})
    _refuse_later_kernels(triton)
    if not hasattr(triton, "next_power_of_2"):  # the placeholder lacks it, and launches ask for it
        triton.next_power_of_2 = next_power_of_2
    if hasattr(worker, "HAS_TRITON"):  # 0.33 asks here, too
        worker.HAS_TRITON = True


def register() -> None:
    """Make vLLM run on this CPU: its plugin, which each of its processes calls. Does nothing on other platforms.

    Without Triton it has vLLM choose Model Runner V2, unless VLLM_USE_V2_MODEL_RUNNER=0 asks for V1.
    """
    from vllm import envs
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if not current_platform.is_cpu():
        return
    # Linux lets a process that has not asked for AMX die at its first tile instruction. vLLM's attention and linear
    # kernels in bfloat16 have them and do not ask; a model's large products ask through oneDNN, a small model's do not.
    torch.cpu._init_amx()
    if not HAS_TRITON and envs.VLLM_USE_V2_MODEL_RUNNER is not False:
        platform: Any = type(current_platform)
        _extend(platform)


@functools.cache
def _extend(platform: Any) -> None:
    """Install the kernels where a worker asks the platform for its own, and only there."""
    import vllm.config.vllm as config

    config.HAS_TRITON = True  # only the choice of the model runner reads it in this module
    native = platform.register_triton_kernel_overrides

    @functools.cache  # two seconds; a worker that is forked from a process which has done it has nothing left to do
    def install_all() -> None:
        native()
        install()

    platform.register_triton_kernel_overrides = staticmethod(install_all)


def preload() -> None:
    """Install the kernels now, for the workers that are forked from this process."""
    from vllm.platforms import current_platform

    register()
    if current_platform.is_cpu():
        current_platform.register_triton_kernel_overrides()
