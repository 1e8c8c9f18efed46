"""vLLM's Model Runner V2 on a CPU without Triton: a torch or numpy function for each Triton kernel that text needs.

:func:`register` is a ``vllm.general_plugins`` entry point, so each process that vLLM starts has it. It uses vLLM's own
``register_kernels``, for vLLM 0.32 and 0.33.

A function takes what it needs of a kernel's parameters, by vLLM's names without ``_ptr``: releases insert parameters,
and the names stay. vLLM does not hand on the grid of a launch, so sizes come from the tensors. At one request a step
costs what its small operations cost, so an ``Array`` parameter gets the tensor's memory as an array of numpy.

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
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

NEG_INF = float("-inf")
NO_DRAFTS = "states of accepted drafts have no CPU version: speculative decoding"

Array: TypeAlias = npt.NDArray[Any]


# --- input_batch ------------------------------------------------------------------------------------------------------
def prepare_prefill_inputs(
    input_ids: Array,
    next_prefill_tokens: Array,
    num_lookahead: int,
    idx_mapping: Array,
    query_start_loc: Array,
    all_token_ids: Array,
    prefill_lens: Array,
    num_computed_tokens: Array,
) -> None:
    """Copy the prompt tokens [S, L] of this step to ``input_ids`` [T], and those after it to [num_lookahead, S]."""
    prefills, computed = prefill_lens[idx_mapping], num_computed_tokens[idx_mapping]
    for i in np.flatnonzero(computed < prefills).tolist():
        slot, begin, end, first = idx_mapping[i], query_start_loc[i], query_start_loc[i + 1], computed[i]
        last = first + end - begin
        input_ids[begin:end] = all_token_ids[slot, first:last]
        if num_lookahead:
            ahead = all_token_ids[slot, last : min(last + num_lookahead, max(last, prefills[i]))]
            next_prefill_tokens[:num_lookahead, slot] = 0
            next_prefill_tokens[: len(ahead), slot] = ahead


def prepare_pos_seq_lens(
    pos: Array,
    seq_lens: Array,
    idx_mapping: Array,
    query_start_loc: Array,
    num_computed_tokens: Array,
    max_num_reqs: int,
) -> None:
    """Write the position of each token [T], and each request's length after the step [N], then 0 to the end."""
    n = len(idx_mapping)
    starts = query_start_loc[: n + 1]
    lens = starts[1:] - starts[:-1]
    computed = num_computed_tokens[idx_mapping]
    seq_lens[:n] = computed + lens
    seq_lens[n:max_num_reqs] = 0
    total = int(starts[-1])
    pos[:total] = np.arange(total) + np.repeat(computed - starts[:-1], lens)


def combine_sampled_and_draft_tokens(
    input_ids: Array,
    idx_mapping: Array,
    last_sampled_tokens: Array,
    query_start_loc: Array,
    seq_lens: Array,
    prefill_len: Array,
    draft_tokens: Array,
    cu_num_logits: Array,
    logits_indices: Array,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
) -> None:
    """Write the index [R] of each token that gets logits; for decodes, put the last sampled token and drafts there."""
    n = len(idx_mapping)
    ends, cu = query_start_loc[1 : n + 1], cu_num_logits[: n + 1]
    counts = cu[1:] - cu[:-1]
    starts = ends - counts
    lens, prefills = seq_lens[:n], prefill_len[idx_mapping]
    total = len(logits_indices)
    logits_indices[:] = np.arange(total) + np.repeat(starts - cu[:-1], counts)
    generates = lens > prefills
    if NUM_NEW_SAMPLED_TOKENS > 0:
        on = generates & (lens - counts >= prefills)  # the other rows keep their prompt's tokens
        input_ids[starts[on]] = last_sampled_tokens.reshape(-1)[idx_mapping[on]]
    if total <= n * NUM_NEW_SAMPLED_TOKENS:
        return  # no drafts
    drafts = counts - NUM_NEW_SAMPLED_TOKENS
    for i in np.flatnonzero(generates & (drafts > 0)).tolist():
        input_ids[ends[i] - drafts[i] : ends[i]] = draft_tokens[idx_mapping[i], : drafts[i]]


def get_num_sampled_and_rejected(
    num_sampled: Array,
    num_rejected: Array,
    seq_lens: Array,
    cu_num_logits: Array,
    idx_mapping: Array,
    prefill_len: Array,
) -> None:
    """Zero ``num_sampled`` [N] inside a prompt; ``num_rejected`` [N] is what the other requests did not accept."""
    n = len(idx_mapping)
    chunked = seq_lens[:n] < prefill_len[idx_mapping]
    num_sampled[:n][chunked] = 0
    num_rejected[:n] = cu_num_logits[1 : n + 1] - cu_num_logits[:n] - num_sampled[:n]
    num_rejected[:n][chunked] = 0


def post_update(
    idx_mapping: Array,
    num_computed_tokens: Array,
    last_sampled_tokens: Array,
    output_bin_counts: Array | None,
    sampled_tokens: Array,
    num_sampled: Array,
    num_rejected: Array,
    query_start_loc: Array | None,
    all_token_ids: Array,
    total_len: Array,
    draft_tokens: Array | None = None,
    draft_tokens_out: Array | None = None,
) -> None:
    """Add the sampled tokens [N, 1 + D] to the state of their slots. A slot of -1 is skipped."""
    n = len(idx_mapping)
    rows: Array | slice = slice(n) if idx_mapping.min(initial=0) >= 0 else np.flatnonzero(idx_mapping >= 0)
    slots, counts, tokens = idx_mapping[rows], num_sampled[rows], sampled_tokens[rows]
    if draft_tokens is not None and draft_tokens_out is not None:
        draft_tokens_out[slots] = draft_tokens[rows]
    for i in range(int(counts.max(initial=0))):
        on: Array | slice = slice(None) if counts.min() > i else counts > i
        to, token = slots[on], tokens[on, i]
        all_token_ids[to, total_len[to] + i] = token
        last_sampled_tokens.reshape(-1)[to] = token
        if output_bin_counts is not None:
            output_bin_counts[to, token] += 1
    total_len[slots] += counts
    delta = -num_rejected[rows]
    if query_start_loc is not None:
        delta += (query_start_loc[1 : n + 1] - query_start_loc[:n])[rows]
    num_computed_tokens[slots] += delta


def post_update_num_computed_tokens(idx_mapping: Array, num_computed_tokens: Array, query_start_loc: Array) -> None:
    """Add each request's tokens of this step to ``num_computed_tokens`` [S]."""
    starts = query_start_loc[: len(idx_mapping) + 1]
    num_computed_tokens[idx_mapping] += starts[1:] - starts[:-1]


def expand_idx_mapping(
    idx_mapping: Array, expanded_idx_mapping: Array, expanded_local_pos: Array, cu_num_logits: Array
) -> None:
    """Repeat each request's slot for its rows of logits [R], and number these rows from 0 within the request [R]."""
    cu = cu_num_logits[: len(idx_mapping) + 1]
    counts = cu[1:] - cu[:-1]
    expanded_idx_mapping[:] = np.repeat(idx_mapping, counts)
    expanded_local_pos[:] = np.arange(len(expanded_local_pos)) - np.repeat(cu[:-1], counts)


# --- buffer_utils, block_table: these kernels get the addresses of int32 tables, not tensors --------------------------
@functools.lru_cache(maxsize=1024)
def _int32_at(address: int, rows: int, width: int) -> Array:
    """Return the int32 array [rows, width] that starts at an address. It owns nothing, so it can be kept."""
    cells = (ctypes.c_int32 * (rows * width)).from_address(address)
    return np.ctypeslib.as_array(cells).reshape(rows, width)


def apply_write(
    output: Array,
    output_stride: Array | int,
    write_indices: Array,
    write_starts: Array,
    write_contents: Array,
    write_cu_lens: Array,
    write_group_ids: Array | None,
    MULTI_GROUP: bool = False,
) -> None:
    """Write pieces of ``write_contents``: piece i into row ``write_indices[i]`` from column ``write_starts[i]`` on.

    ``output`` is the table [S, B] or [S]; with MULTI_GROUP it holds the addresses of G tables, and the strides theirs.
    """
    begin = 0
    for i, (row, first, end) in enumerate(
        zip(write_indices.tolist(), write_starts.tolist(), write_cu_lens.tolist(), strict=True)
    ):
        if MULTI_GROUP:
            assert write_group_ids is not None and not isinstance(output_stride, int)
            group = write_group_ids[i]
            target = _int32_at(int(output[group]), 1 + row, int(output_stride[group]))[row, first:]
        else:
            target = output[row + first :] if output.ndim == 1 else output[row, first:]
        target[: end - begin] = write_contents[begin:end]
        begin = end


def gather_block_tables(
    batch_idx_to_req_idx: Array,
    src_block_table_ptrs: Array,
    dst_block_table_ptrs: Array,
    block_table_strides: Array,
    num_blocks: Array,
    num_reqs: int,
    num_computed_tokens: Array | None = None,
    sliding_window_reach: Array | None = None,
    block_sizes: Array | None = None,
    MASK_SLIDING_WINDOW: bool = False,
) -> None:
    """Copy the requests' rows of each group's table [S, B] to the first N rows of the step's own table [S, B].

    Blocks that a sliding window has left behind become block 0. Rows after N keep what they hold: nothing reads them
    where there are no CUDA graphs.
    """
    slots, max_reqs = batch_idx_to_req_idx, num_blocks.shape[1]
    sources, targets = src_block_table_ptrs.tolist(), dst_block_table_ptrs.tolist()
    for group, stride in enumerate(block_table_strides.tolist()):
        # Cells after a row's own blocks are never read, so all rows are as wide as the widest.
        width = int(num_blocks[group, slots].max(initial=0))
        if not width:
            continue
        rows = _int32_at(sources[group], max_reqs, stride)[slots, :width]
        if MASK_SLIDING_WINDOW:
            assert num_computed_tokens is not None and sliding_window_reach is not None and block_sizes is not None
            reach = int(sliding_window_reach[group])
            if reach > 0:
                left = np.maximum(num_computed_tokens[slots] - reach, 0) // int(block_sizes[group])
                rows[np.arange(width) < left[:, None]] = 0
        _int32_at(targets[group], max_reqs, stride)[:num_reqs, :width] = rows


def compute_slot_mappings(
    max_num_tokens: int,
    idx_mapping: Array,
    query_start_loc: Array,
    pos: Array,
    block_table_ptrs: Array,
    block_table_strides: Array,
    block_sizes: Array,
    slot_mapping_enabled: Array,
    slot_mappings: Array,
    CP_SIZE: int,
    PAD_ID: int,
) -> None:
    """Write where in each group's KV cache a token goes [G, max_num_tokens]: PAD_ID after T, and for a slot of -1."""
    if CP_SIZE != 1:
        raise ValueError(f"CP_SIZE={CP_SIZE}: torchrl_moe's CPU kernels do not split a context over ranks")
    starts = query_start_loc[: len(idx_mapping) + 1]
    total = int(starts[-1])
    positions = pos[:total]
    slot_mappings[:, total:max_num_tokens] = PAD_ID
    of_token = np.repeat(idx_mapping, starts[1:] - starts[:-1])
    rows = int(idx_mapping.max(initial=-1)) + 1
    sizes, tables, strides = block_sizes.tolist(), block_table_ptrs.tolist(), block_table_strides.tolist()
    for group, enabled in enumerate(slot_mapping_enabled.tolist()):
        if not enabled or not rows:
            slot_mappings[group, :total] = PAD_ID
            continue
        size = sizes[group]
        block = positions // size
        # A dummy request (slot -1) reads the last row, which is there, and is overwritten below.
        ids = _int32_at(tables[group], rows, strides[group])[of_token, block]
        slot_mappings[group, :total] = ids * np.int64(size) + (positions - block * size)
        if idx_mapping.min() < 0:
            slot_mappings[group, :total][of_token < 0] = PAD_ID


def zero_kv_blocks(seg_addrs: Array, seg_block_strides: Array, seg_page_sizes: Array, block_ids: Array) -> None:
    """Zero new blocks [N] in each segment of the cache, given its address, and stride and size of a block in int32."""
    blocks = block_ids.tolist()
    segments = zip(seg_addrs.tolist(), seg_block_strides.tolist(), seg_page_sizes.tolist(), strict=True)
    for address, stride, size in segments:
        for block in blocks:
            ctypes.memset(address + 4 * block * stride, 0, 4 * size)


# --- mamba: a hybrid model's states lie in blocks of the cache, too ---------------------------------------------------
def preprocess_mamba_align(
    idx_mapping: Array,
    state_idx: Array,
    num_computed_tokens: Array,
    query_start_loc: Array,
    num_accepted_tokens: Array,
    src_col: Array,
    src_off: Array,
    num_reqs: int,
    MAMBA_BLOCK_SIZE: int,
) -> None:
    """Write each request's block before the step, and advance ``state_idx`` [S] to the block that the step ends in."""
    slots, starts = idx_mapping[:num_reqs], query_start_loc[: num_reqs + 1]
    before = state_idx[slots]
    src_col[slots] = before
    src_off[slots] = np.maximum(num_accepted_tokens[slots] - 1, 0)
    ends = num_computed_tokens[slots] + starts[1:] - starts[:-1]
    state_idx[slots] = after = (ends + MAMBA_BLOCK_SIZE - 1) // MAMBA_BLOCK_SIZE - 1
    num_accepted_tokens[slots[(before >= 0) & (before != after)]] = 1


def precopy_mamba_align(
    mamba_state_idx: Array,
    src_col: Array,
    token_bias: Array,
    block_table_ptrs: Array,
    block_table_stride_req: int,
    state_base_addrs: Array,
    state_block_strides: Array,
    state_elem_sizes: Array,
    state_inner_sizes: Array,
    state_conv_widths: Array,
    state_group_indices: Array,
    state_dim_row_count: Array,
    state_dim_row_stride: Array,
    idx_mapping: Array,
    num_reqs: int,
    CONV_STATE_DIM_FIRST: bool,
) -> None:
    """Copy the states of requests that enter another block to it; one column of a state is a block of its layer."""
    slots = idx_mapping[:num_reqs]
    slots = slots[slots >= 0]
    slots = slots[(src_col[slots] >= 0) & (src_col[slots] != mamba_state_idx[slots])]
    if not slots.size:
        return  # the usual step
    if token_bias[slots].any():
        raise MissingKernelError(NO_DRAFTS)
    tables = block_table_ptrs.tolist()
    for i, base in enumerate(state_base_addrs.tolist()):
        stride, width, element = int(state_block_strides[i]), int(state_conv_widths[i]), int(state_elem_sizes[i])
        for slot in slots.tolist():
            table_row = tables[state_group_indices[i]] + 4 * slot * block_table_stride_req
            table = _int32_at(table_row, 1, block_table_stride_req)[0]
            there, here = (base + int(table[columns[slot]]) * stride for columns in (src_col, mamba_state_idx))
            if CONV_STATE_DIM_FIRST and width:
                for row in range(int(state_dim_row_count[i])):
                    at = row * int(state_dim_row_stride[i])
                    ctypes.memmove(here + at, there + at, width * element)
            else:
                ctypes.memmove(here, there, int(state_inner_sizes[i]) * element * (width or 1))


def postprocess_mamba(
    num_accepted_tokens: Array,
    num_computed_tokens: Array,
    num_accepted_tokens_out: Array,
    idx_mapping: Array,
    num_reqs: int,
    block_size: int,
    PRECOMPUTED_NEW_COMPUTED: bool,
) -> None:
    """Refuse accepted drafts, whose states it would copy; without drafts a step's last state is where it belongs."""
    slots = idx_mapping[:num_reqs]
    slots = slots[slots >= 0]
    computed, accepted = num_computed_tokens[slots], num_accepted_tokens[slots]
    aligned = computed // block_size * block_size
    full = aligned >= computed - accepted + 1  # a block ended among the accepted tokens
    if not PRECOMPUTED_NEW_COMPUTED or (accepted[full] != 1).any():
        raise MissingKernelError(NO_DRAFTS)
    num_accepted_tokens_out[slots[full]] = 1


def scatter_num_accepted(idx_mapping: Array, num_sampled: Array, num_accepted: Array) -> None:
    """Write the number of tokens that each request got [S], at least 1."""
    on = idx_mapping >= 0
    num_accepted[idx_mapping[on]] = np.maximum(num_sampled[: len(on)][on], 1)


def fill_num_accepted(idx_mapping: Array, num_accepted: Array, num_sampled: int) -> None:
    """Write the same number of tokens for each request [S]."""
    num_accepted[idx_mapping[idx_mapping >= 0]] = num_sampled


# --- sample: logits are float32 where vLLM changes them; elsewhere they may be of the model's dtype -------------------
def temperature(logits: Tensor, expanded_idx_mapping: Array, temperature: Array) -> None:
    """Divide each row of the logits [R, V] by its request's temperature [S]; 0 is greedy, and changes nothing."""
    of_row = temperature[expanded_idx_mapping]
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


@functools.lru_cache(maxsize=4)
def _scrambled_tokens(vocab_size: int) -> Array:
    """Return the part of the hash that depends on the token only, uint32 [V]."""
    tokens: Array = _scramble(np.arange(vocab_size, dtype=np.uint64)).astype(np.uint32)
    return tokens


def _murmur3(seeds: Array, positions: Array, vocab_size: int, domain: int = 0) -> Array:
    """Return vLLM's hash of (seed, position, token) bit for bit, uint32 [R, V], for int64 [R] and [R]."""
    # MurmurHash3's state after a seed's 64 bits and a position's 32
    alone = len(seeds) == 1  # then in ints: a third of the time of small arrays
    seed: Any = int(seeds[0]) if alone else seeds.view(np.uint64)
    position: Any = int(positions[0]) if alone else positions.view(np.uint64)
    state: Any = domain
    for key in (seed & _LOW_32, seed >> 32 & _LOW_32, position & _LOW_32):
        state = _rotate(state ^ _scramble(key), 13) * 5 + 0xE6546B64 & _LOW_32
    hashed = np.atleast_1d(np.asarray(state, np.uint32))[:, None] ^ _scrambled_tokens(vocab_size)
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


def _gumbel_noise(seeds: Array, positions: Array, vocab_size: int, fp64: bool) -> Tensor:
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
    local_argmax: Array,
    local_max: Array,
    logits_cache: Tensor | None,
    logits: Tensor,
    expanded_idx_mapping: Array,
    seeds: Array,
    pos: Array,
    temp: Array,
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
        raise MissingKernelError("vLLM's cache of draft logits has no CPU version: no speculative decoding")
    slots = expanded_idx_mapping
    of_row = temp[slots]
    of_row[slots < 0] = 0.0  # padding
    scores = logits.float()
    sampled = np.flatnonzero(of_row)
    if sampled.size:
        positions = pos[sampled].astype(np.int64, copy=False)
        if IS_DRAFTING:
            positions = positions + _DRAFT_SALT
        noise = _gumbel_noise(seeds[slots[sampled]], positions, vocab_size, USE_FP64)
        index = None if sampled.size == slots.size else torch.from_numpy(sampled)
        chosen = scores if index is None else scores[index]
        if APPLY_TEMPERATURE:
            chosen = chosen / torch.from_numpy(of_row[sampled]).unsqueeze(1)
        noise += chosen
        scores = noise if index is None else scores.to(noise.dtype).index_copy(0, index, noise)
    values = scores.numpy()
    local_max[:, 1:] = NEG_INF
    local_max[:, 0] = values.max(axis=1)
    local_argmax[:, 0] = values.argmax(axis=1)


def topk_log_softmax(output: Tensor, logits: Tensor, topk_ids: Tensor) -> None:
    """Write the log-probs [R, K], float32, of the tokens ``topk_ids`` [R, K] under the logits [R, V]."""
    torch.gather(logits.float().log_softmax(dim=1), 1, topk_ids, out=output)


def ranks(output: Tensor, logits: Tensor, token_ids: Tensor) -> None:
    """Write how many logits of each row [R, V] are at least the token's [R]: 1 for the largest, V for one at -inf."""
    torch.sum(logits >= logits.gather(1, token_ids.long().unsqueeze(1)), dim=1, out=output)


def fill_logprob_token_ids(
    out_token_ids: Array,
    out_valid_mask: Array,
    sampled_token_ids: Array,
    topk_indices: Array,
    expanded_idx_mapping: Array,
    num_per_req_token_ids: Array,
    per_req_token_ids: Array,
    NUM_TOPK: int,
) -> None:
    """Write which tokens [R, 1 + C] get log-probs: the sampled one, then the request's own, or else the top ones."""
    out_token_ids[:, 0] = sampled_token_ids
    out_valid_mask[:, 0] = True
    for i, slot in enumerate(expanded_idx_mapping):
        count = num_per_req_token_ids[slot]
        source = per_req_token_ids[slot, :count] if count else topk_indices[i, :NUM_TOPK]
        out_token_ids[i, 1 : 1 + len(source)] = source
        out_valid_mask[i, 1 : 1 + len(source)] = True


def min_p(logits: Tensor, expanded_idx_mapping: Tensor, min_p: Tensor) -> None:
    """Mask what is less probable than ``min_p`` [S] times the row's best, in the logits [R, V]; 0 masks nothing."""
    log_share = min_p[expanded_idx_mapping].float().log()  # log 0 is -inf, and nothing is below
    threshold = logits.amax(dim=1).float() + log_share
    logits.masked_fill_(logits < threshold.unsqueeze(1), NEG_INF)


def compact_sampling_mask(
    logits: Tensor,
    cu_num_logits: Array,
    num_sampled_tokens: Array,
    token_ids: Array,
    packed_mask: Array,
    counts: Array,
    max_num_kept: int,
    ROWS_PER_REQUEST: int,
) -> None:
    """Write for each sampled token which ids were kept (a finite logit), for requests x ROWS_PER_REQUEST rows.

    ``counts`` says how many; ``token_ids`` [rows, max_num_kept] are the first of them; ``packed_mask`` [rows, V / 8]
    has a bit for each entry of the vocabulary. The rows of other tokens get the count 0.
    """
    place = np.arange(ROWS_PER_REQUEST)
    active = place < num_sampled_tokens[:, None]
    sources = (cu_num_logits[: len(active), None] + place)[active]
    out = np.flatnonzero(active)
    values = logits.float().numpy()
    keep = np.isfinite(values if len(sources) == len(values) else values[sources])  # if all are sampled, in order
    packed_mask[out] = np.packbits(keep, axis=1, bitorder="little")
    counts[:] = 0
    for to, kept in zip(out.tolist(), keep, strict=True):
        tokens = np.flatnonzero(kept)
        counts[to] = len(tokens)
        token_ids[to, : len(tokens[:max_num_kept])] = tokens[:max_num_kept]


def _unpack(packed: Array, vocab_size: int) -> Array:
    """Return the bits of int32 numbers [..., V / 32] as bool [..., V]."""
    return np.unpackbits(packed.view(np.uint8), axis=-1, bitorder="little")[..., :vocab_size].view(np.bool_)


def penalties(
    logits: Array,
    expanded_idx_mapping: Array,
    token_ids: Array,
    expanded_local_pos: Array,
    repetition_penalty: Array,
    frequency_penalty: Array,
    presence_penalty: Array,
    prompt_bin_mask: Array,
    output_bin_counts: Array,
    vocab_size: int,
) -> None:
    """Penalise, in the logits [R, V], tokens of answers, [S, V], and for repetition of prompts, bits [S, V / 32]."""
    slots = expanded_idx_mapping
    repetition, frequency, presence = repetition_penalty[slots], frequency_penalty[slots], presence_penalty[slots]
    for i in np.flatnonzero((repetition != 1.0) | (frequency != 0.0) | (presence != 0.0)).tolist():
        row, count = logits[i], output_bin_counts[slots[i], :vocab_size]
        if before := int(expanded_local_pos[i]):  # drafts at earlier rows of the same request
            count = count + np.bincount(token_ids[i - before + 1 : i + 1], minlength=vocab_size)
        seen = count > 0
        if repetition[i] != 1.0:
            known = seen | _unpack(prompt_bin_mask[slots[i]], vocab_size)
            row *= np.where(known, np.where(row > 0, np.float32(1.0) / repetition[i], repetition[i]), np.float32(1.0))
        row -= frequency[i] * count.astype(np.float32)
        row -= presence[i] * seen.astype(np.float32)


def bincount(
    expanded_idx_mapping: Array,
    all_token_ids: Array,
    prompt_len: Array,
    prefill_len: Array,
    prompt_bin_mask: Array,
    output_bin_counts: Array,
) -> None:
    """Add prompts' tokens to bits [S, V / 32], and count those of answers that were computed before [S, V]."""
    for slot in expanded_idx_mapping.tolist():
        tokens, prompt, end = all_token_ids[slot], prompt_len[slot], prefill_len[slot]
        bits = np.zeros(prompt_bin_mask.shape[1] * 32, dtype=np.bool_)
        bits[tokens[:prompt]] = True
        prompt_bin_mask[slot] |= np.packbits(bits, bitorder="little").view(np.int32)
        counts = np.bincount(tokens[prompt:end], minlength=output_bin_counts.shape[1])
        output_bin_counts[slot] += counts.astype(np.int32)


def bias(
    logits: Array,
    expanded_idx_mapping: Array,
    num_allowed_token_ids: Array,
    allowed_token_ids: Array,
    num_logit_bias: Array,
    bias_token_ids: Array,
    bias: Array,
    pos: Array,
    min_lens: Array,
    num_stop_token_ids: Array,
    restore_when_all_masked: Array,
    stop_token_ids: Array,
    CHECK_ALL_MASKED_ROWS: bool,
) -> None:
    """Change the logits [R, V]: mask all but allowed tokens, add biases, mask the stop tokens of too short answers.

    Where that leaves no token, a request that asks for it gets its stop tokens back.
    """
    for i, (slot, row) in enumerate(zip(expanded_idx_mapping.tolist(), logits, strict=True)):
        allowed, biased, stops = num_allowed_token_ids[slot], num_logit_bias[slot], num_stop_token_ids[slot]
        if allowed:
            ids = allowed_token_ids[slot, :allowed]
            kept = row[ids]
            row.fill(NEG_INF)
            row[ids] = kept
        if biased:
            row[bias_token_ids[slot, :biased]] += bias[slot, :biased]
        if stops and pos[i] + 1 < min_lens[slot]:
            ids = stop_token_ids[slot, :stops]
            saved = row[ids]
            row[ids] = NEG_INF
            if CHECK_ALL_MASKED_ROWS and restore_when_all_masked[slot] and row.max() == NEG_INF:
                row[ids] = np.where(np.isfinite(saved), saved, NEG_INF)


def bad_words(
    logits: Array,
    expanded_idx_mapping: Array,
    bad_word_token_ids: Array,
    bad_word_offsets: Array,
    num_bad_words: Array,
    all_token_ids: Array,
    prompt_len: Array,
    total_len: Array,
    input_ids: Array,
    expanded_local_pos: Array,
) -> None:
    """Mask, in the logits [R, V], the last token of each bad word whose other tokens the answer ends with."""
    for i, slot in enumerate(expanded_idx_mapping.tolist()):
        if not num_bad_words[slot]:
            continue
        offsets = bad_word_offsets[slot, : num_bad_words[slot] + 1].tolist()
        tokens = bad_word_token_ids[slot, : offsets[-1]].tolist()
        words = [tokens[a:b] for a, b in itertools.pairwise(offsets)]
        end = int(total_len[slot])
        begin = max(int(prompt_len[slot]), end - max(map(len, words)))
        answer = all_token_ids[slot, begin:end].tolist()
        if ahead := int(expanded_local_pos[i]):
            answer += input_ids[i - ahead + 1 : i + 1].tolist()
        for *before, last in words:
            if not before or answer[-len(before) :] == before:
                logits[i, last] = NEG_INF


def prompt_logprobs_token_ids(
    prompt_logprobs_token_ids: Array,
    query_start_loc: Array,
    idx_mapping: Array,
    num_computed_tokens: Array,
    all_token_ids: Array,
) -> None:
    """Write the token after each token of the step [T]: the one whose log-prob is asked for."""
    for slot, (begin, end) in zip(idx_mapping, itertools.pairwise(query_start_loc), strict=False):
        first = num_computed_tokens[slot] + 1
        following = all_token_ids[slot, first : first + end - begin]
        prompt_logprobs_token_ids[begin:end] = 0  # the last place of a full row has nothing after it
        prompt_logprobs_token_ids[begin : begin + len(following)] = following


def apply_grammar_bitmask(
    logits: Tensor,
    logits_indices: Array,
    cu_num_logits: Array,
    bitmask: Array,
    vocab_size: int,
    MASK_STRIDE: int,
) -> None:
    """Mask, in the logits [R, V], the ids whose bit is 0.

    ``bitmask`` is [M, V / 32]. ``logits_indices`` [M] are request x MASK_STRIDE + row of the request; rows that the
    step does not have are passed over.
    """
    request, place = np.divmod(logits_indices, MASK_STRIDE)
    first = cu_num_logits[request]
    on = place < cu_num_logits[request + 1] - first
    rows = torch.from_numpy((first + place)[on].astype(np.int64))
    masked = torch.from_numpy(~_unpack(bitmask[on], vocab_size))
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
        raise _unknown_release(f"its kernel {name} has no parameter {', '.join(missing)}, which torchrl_moe needs")
    places = [(i, n) for i, n in enumerate(names) if n in wanted]
    arrays = [n for n, parameter in wanted.items() if str(parameter.annotation).startswith("Array")]

    def launch(*args: object, **constants: object) -> None:
        given = {n: args[i] for i, n in places if i < len(args)}
        given |= {n: value for n, value in constants.items() if n in wanted}
        for n in arrays:
            value = given.get(n)
            if isinstance(value, Tensor):
                given[n] = value.numpy()
        function(**given)

    launch.__name__ = function.__name__
    return launch


def _unknown_release(what: str) -> RuntimeError:
    import vllm

    return RuntimeError(f"vLLM {vllm.__version__}: {what}. Use vLLM 0.32 or 0.33.")


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


@functools.cache
def install() -> None:
    """Replace the kernels in this process, once: those of :data:`KERNELS` by ours, others by an error that names
    them.
    """
    import vllm.v1.worker.cpu.shm  # noqa: F401 - first: the kernels' modules import by name what it replaces
    import vllm.v1.worker.gpu_worker as worker
    from vllm.triton_utils import triton
    from vllm.triton_utils.dispatcher import KernelOverride, register_kernels
    from vllm.utils.math_utils import next_power_of_2

    ours = {}
    for name, function in KERNELS.items():
        module, _, attribute = name.rpartition(".")
        kernel = getattr(importlib.import_module(module), attribute, None)
        if kernel is None:
            raise _unknown_release(f"it has no kernel {name}")
        ours[name] = by_name(name, kernel, function)
    # all kernels in vLLM's modules that are imported: its placeholder of Triton hands on a decorated function as it is,
    # so the line of its decorator tells it
    refused = {}
    for module, host in list(sys.modules.items()):
        if not module.startswith("vllm.") or vars(host).get("triton") is not triton:
            continue
        for attribute, value in vars(host).items():
            if isinstance(value, FunctionType) and value.__module__ == module:
                code = value.__code__
                if linecache.getline(code.co_filename, code.co_firstlineno).lstrip().startswith("@triton."):
                    refused[f"{module}.{attribute}"] = _refusal(f"{module}.{attribute}")
    register_kernels({**refused, **ours})
    # and those of modules that are imported from now on
    decorate = triton.jit

    def stand_in(function: Callable[..., object]) -> KernelOverride:
        return KernelOverride(function, _refusal(f"{function.__module__}.{function.__qualname__}"))

    def jit(*args: Callable[..., object], **options: object) -> object:
        decorated = decorate(*args, **options)
        return stand_in(decorated) if args else lambda function: stand_in(decorated(function))

    triton.jit = jit
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
