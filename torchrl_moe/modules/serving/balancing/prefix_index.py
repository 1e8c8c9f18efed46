"""Which replicas hold which prefixes, inferred from placements: an index over hashed blocks of prompts.

A prompt becomes a chain of keys, one for each block boundary and one for its end; a key identifies everything before
it, so two prompts share as many keys as they share whole blocks. Keys are xxh3 hashes of bytes: equal in every process,
whatever Python's own hash salt.
"""

from __future__ import annotations

import json
import struct
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from torchrl_moe._checks import check_number

__all__ = ["TOKEN_BYTES", "Branch", "PrefixIndex", "prompt_bytes", "prompt_keys"]

TOKEN_BYTES = 4  # an int32 id, and about the bytes of a token of text
BLOCK = 32 * TOKEN_BYTES  # two of vLLM's blocks on GPUs
HOLDERS = 32  # remembered of one prefix
HALF_LIFE = 1024  # distinct prompts after which what was counted before weighs half


def _spans(limit: int) -> list[tuple[int, int]]:
    """Block boundaries, up to ``limit`` bytes; late blocks are an eighth of what precedes them, to keep keys few."""
    spans = [(0, BLOCK)]
    while spans[-1][1] < limit:
        start = spans[-1][1]
        blocks = start // BLOCK
        spans.append((start, start + BLOCK * max(1, blocks // 8)))
    return spans


SPANS = _spans(TOKEN_BYTES << 24)  # a prompt of 16 million tokens has 107 keys
ENDS = [end for _, end in SPANS]
_packer = lru_cache(maxsize=4096)(lambda length: struct.Struct(f"{length}i").pack)


def prompt_bytes(prompt: Any) -> tuple[bytes, int] | None:
    """Return the bytes of a prompt, and a seed for its kind; ``None`` for an empty prompt, or what is not one.

    Text, chats (a list of messages, each a mapping), token ids (a list, or anything numpy reads as integers), and
    mappings with ``prompt_token_ids`` or ``prompt``. A chat begins with the bytes of any chat that it continues.
    """
    if isinstance(prompt, str):
        return (prompt.encode(errors="surrogatepass"), 1) if prompt else None
    if isinstance(prompt, Mapping):
        ids = prompt.get("prompt_token_ids")
        return prompt_bytes(prompt.get("prompt") if ids is None else ids)
    if prompt is None or len(prompt) == 0:
        return None
    if isinstance(prompt, list):
        if isinstance(prompt[0], Mapping):
            return "".join(json.dumps(message, sort_keys=True, default=str) for message in prompt).encode(), 2
        return _packer(len(prompt))(*prompt), 0
    return np.asarray(prompt, dtype=np.int32).tobytes(), 0


def prompt_keys(data: bytes, seed: int = 0) -> list[int]:
    """Return the keys of a prompt's prefixes of whole blocks, shortest first, and then, negative, that of all of it.

    >>> prompt_keys(bytes(128))[:1] == prompt_keys(bytes(200))[:1]
    True
    """
    spans = SPANS[: bisect_right(ENDS, len(data))]
    key = seed
    keys = [key := xxh3_64_intdigest(data[start:end], key) for start, end in spans]
    keys.append(-1 - xxh3_64_intdigest(data[spans[-1][1] if spans else 0 :], key))
    return keys


Branch = tuple[list[int], int, int, tuple[int, ...]]
"""A run of keys that no prompt has left so far; how many distinct prompts went through it as of an epoch (each one
since halves it); that epoch; the numbers of the caches that hold it, the latest last."""


class PrefixIndex:
    """A radix tree of prompts' keys, its least recently used branches dropped.

    A key identifies everything before it, so a branch is found by its first key alone.

    Args:
        capacity: keys kept; one takes about three hundred bytes where prompts are short.
    """

    def __init__(self, capacity: int = 1 << 18) -> None:
        check_number("capacity", capacity, 1, whole=True)
        self.capacity = capacity
        self._branches: OrderedDict[int, Branch] = OrderedDict()
        self._size = 0  # keys
        self._epoch = 0
        self._prompts = 0  # distinct ones, halved each epoch

    def __len__(self) -> int:
        return self._size

    def match(self, keys: list[int]) -> tuple[list[Branch], bool]:
        """Return the branches on a prompt's path, shortest prefix first, and whether the prompt is a distinct one.

        It is not distinct if it came before, or continues an earlier one, like a conversation's next turn.
        """
        known: list[Branch] = []
        position = 0
        while position < len(keys):
            branch = self._branches.get(keys[position])
            if branch is None:
                return known, True
            run = branch[0]
            known.append(branch)
            common = _common(run, keys, position)
            if common < len(run):
                return known, not (run[-1] < 0 and common == len(run) - 1)
            position += common
        return known, False

    def share(self, branch: Branch, is_distinct: bool) -> float:
        """Return the share of all distinct prompts that begin with a branch; 0 if only one does.

        Args:
            branch: on the path of the prompt in question.
            is_distinct: whether that prompt is one more.
        """
        prompts = (branch[1] >> (self._epoch - branch[2])) + is_distinct
        return prompts / (self._prompts + is_distinct) if prompts > 1 else 0.0

    def record(self, keys: list[int], cache: int, is_distinct: bool) -> None:
        """Note that a prompt went to the replica whose cache has this number.

        Args:
            keys: of the prompt.
            cache: the number.
            is_distinct: what :meth:`match` said.
        """
        branches, epoch = self._branches, self._epoch
        way = []
        position = 0
        while position < len(keys):
            first = keys[position]
            way.append(first)
            branch = branches.get(first)
            if branch is None:
                run = keys[position:]
                self._size += len(run)
                branches[first] = (run, 1, epoch, (cache,))
                break
            run, prompts, since, caches = branch
            common = _common(run, keys, position)
            if common < len(run):  # the prompt diverges here: the rest becomes a separate branch
                branches[run[common]] = (run[common:], prompts, since, caches)
                run = run[:common]
            position += common
            if cache != caches[-1]:
                caches = (*(other for other in caches if other != cache), cache)[-HOLDERS:]
            branches[first] = (run, (prompts >> (epoch - since)) + is_distinct, epoch, caches)
        for first in reversed(way):  # what leads to a branch outlives it
            branches.move_to_end(first)
        if is_distinct:
            self._prompts += 1
            if self._prompts >= 2 * HALF_LIFE:
                self._prompts >>= 1
                self._epoch += 1
        while self._size > self.capacity:
            _, branch = branches.popitem(last=False)
            self._size -= len(branch[0])


def _common(run: list[int], keys: list[int], position: int) -> int:
    """Return how many keys of a run match ``keys`` from a position on; only its last key ends a prompt."""
    if run == keys[position : position + len(run)]:
        return len(run)
    return next(i for i, key in enumerate(run) if key != keys[position + i])
