"""Which replicas hold which prefixes, as far as placements tell: an index over hashed blocks of prompts.

A prompt becomes a chain of keys, one for each block boundary and one for its end; a key names all that stands before
it, so two prompts share as many keys as they share whole blocks. Keys are xxh3 hashes of bytes: equal in every process,
whatever Python's own hash salt.
"""

from __future__ import annotations

import json
import struct
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

__all__ = ["TOKEN_BYTES", "PrefixIndex", "PrefixNode", "prompt_bytes", "prompt_keys"]

WHOLE = 1 << 63  # sets the key of a whole prompt apart from that of its last block
TOKEN_BYTES = 4  # an int32 id, and about what a token of text has
BLOCK = 16 * TOKEN_BYTES  # vLLM's block on GPUs
FINE_BLOCKS = 16  # so many blocks of that size; later ones grow, so that keys are few
HOLDERS = 32  # remembered of one prefix
HALF_LIFE = 1024  # distinct prompts after which what was counted before weighs half


def _boundaries(limit: int) -> list[int]:
    """Where blocks end, up to ``limit`` bytes: every block at first, then a block in every eighth of the length."""
    ends = [BLOCK]
    while ends[-1] < limit:
        blocks = ends[-1] // BLOCK
        ends.append((blocks + max(1, blocks // 8 if blocks >= FINE_BLOCKS else 1)) * BLOCK)
    return ends


ENDS = _boundaries(TOKEN_BYTES << 24)  # a prompt of 16 million tokens has 130 keys


def prompt_bytes(prompt: Any) -> tuple[bytes, int] | None:
    """Return what stands for a prompt, and a seed for its kind; ``None`` for what is no prompt, or an empty one.

    Text, chats (a list of messages, each a mapping), token ids (a list, or anything numpy reads as integers), and
    mappings with ``prompt_token_ids`` or ``prompt``. A chat begins with the bytes of any chat that it continues.
    """
    if isinstance(prompt, Mapping):
        ids = prompt.get("prompt_token_ids")
        return prompt_bytes(prompt.get("prompt") if ids is None else ids)
    if isinstance(prompt, str):
        return (prompt.encode(errors="surrogatepass"), 1) if prompt else None
    if prompt is None or len(prompt) == 0:
        return None
    if isinstance(prompt[0], Mapping):
        return "".join(json.dumps(message, sort_keys=True, default=str) for message in prompt).encode(), 2
    if isinstance(prompt, list):
        return struct.pack(f"{len(prompt)}i", *prompt), 0
    return np.asarray(prompt, dtype=np.int32).tobytes(), 0


def prompt_keys(data: bytes, seed: int = 0) -> list[int]:
    """Return the keys of a prompt's prefixes of whole blocks, shortest first, and that of the prompt itself.

    >>> prompt_keys(bytes(64))[:1] == prompt_keys(bytes(80))[:1]
    True
    """
    keys = []
    start, key = 0, seed
    for end in ENDS[: bisect_right(ENDS, len(data))]:
        key = xxh3_64_intdigest(data[start:end], key)
        keys.append(key)
        start = end
    keys.append(xxh3_64_intdigest(data[start:], key ^ WHOLE))
    return keys


PrefixNode = tuple[int, int, tuple[int, ...], bool]
"""What is known of one prefix: how many distinct prompts began with it as of an epoch (each one since halves it); that
epoch; the numbers of the caches that hold it, the latest last; and whether no longer prompt began with it."""


class PrefixIndex:
    """Prefixes by key, the least recently used ones dropped.

    Args:
        capacity: keys kept; one takes about a quarter of a kilobyte.
    """

    def __init__(self, capacity: int = 1 << 16) -> None:
        self.capacity = capacity
        self._nodes: OrderedDict[int, PrefixNode] = OrderedDict()
        self._epoch = 0
        self._prompts = 0  # distinct ones, halved each epoch

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, key: int) -> PrefixNode | None:
        """Return what is known of a prefix."""
        return self._nodes.get(key)

    def match(self, keys: Sequence[int]) -> tuple[list[PrefixNode], bool]:
        """Return what is known of a prompt's prefixes, shortest first, and whether the prompt is a distinct one.

        It is not, if it came before, or goes on where another one ended: a conversation's next turn.
        """
        nodes = self._nodes
        known = []
        for key in keys[:-1]:
            node = nodes.get(key)
            if node is None:
                break
            known.append(node)
        is_distinct = not (known and known[-1][3])
        same = nodes.get(keys[-1])
        if same is not None:
            known.append(same)
            is_distinct = False
        return known, is_distinct

    def is_shared(self, node: PrefixNode, is_distinct: bool) -> bool:
        """Whether more than half of all distinct prompts begin so: a template, which says nothing of where to go.

        Args:
            node: of the prefix.
            is_distinct: whether the prompt that is asked about is one more of them.
        """
        prompts = (node[0] >> (self._epoch - node[1])) + is_distinct
        return prompts > 1 and 2 * prompts > self._prompts + is_distinct

    def record(self, keys: Sequence[int], cache: int, is_distinct: bool) -> None:
        """Note that a prompt went to the replica whose cache has this number.

        Args:
            keys: of the prompt.
            cache: the number.
            is_distinct: what :meth:`match` said.
        """
        nodes, epoch = self._nodes, self._epoch
        last = len(keys) - 2  # the longest prefix of whole blocks
        for i, key in enumerate(keys):
            node = nodes.get(key)
            if node is None:
                nodes[key] = (1, epoch, (cache,), i >= last)
                continue
            nodes.move_to_end(key)
            prompts, since, caches, is_end = node
            if cache not in caches:
                caches = (*caches, cache)[-HOLDERS:]
            elif not is_distinct and is_end == (i >= last):
                continue
            nodes[key] = ((prompts >> (epoch - since)) + is_distinct, epoch, caches, is_end and i >= last)
        if is_distinct:
            self._prompts += 1
            if self._prompts >= 2 * HALF_LIFE:
                self._prompts >>= 1
                self._epoch += 1
        while len(nodes) > self.capacity:
            nodes.popitem(last=False)
