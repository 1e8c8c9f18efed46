"""From the tree of a session to the TensorDicts that losses take, and those as a file.

The keys are those of docs/loop.md. A trajectory is a path from the root to a leaf, masked to the tokens that it is
trained on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import safetensors.torch
import torch
from tensordict import NonTensorData, TensorClass, TensorDict, is_leaf_nontensor
from torch import Tensor
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens

from torchrl_moe._checks import shown
from torchrl_moe.data import KeptTokens, RoutedExperts
from torchrl_moe.data.segments import num_segments, worst_resume
from torchrl_moe.http.tree import NO_VERSION, Node
from torchrl_moe.modules.backends.replica import leaves_ids_out
from torchrl_moe.modules.policies.rollout import CHANGES_NOTHING, SAMPLING, sampling_entry

CLASSES: Mapping[tuple[str, ...], type[TensorClass]] = {
    ("tokens",): Tokens,
    ("masks",): Masks,
    ("log_probs",): LogProbs,
    ("routed_experts",): RoutedExperts,
    (SAMPLING, "kept"): KeptTokens,
}
ROUTES_OF = "routes_of"
"""In a file without routes: the number of the answer that a trajectory ends in."""


def trajectories_of(answers: Sequence[Node], shared: Literal["first", "all"]) -> list[tuple[TensorDict, int]]:
    """Return each trajectory with the number of the answer that it ends in; see ``Session.trajectories``."""
    if shared not in ("first", "all"):
        raise ValueError(f"shared must be 'first' or 'all', got {shown(shared)}")
    inner: set[int] = set()  # answers that others continue: no trajectory ends in them
    for node in answers:
        before = node.parent
        while before is not None and before.answer is None:
            before = before.parent
        inner.add(id(before))
    taken: set[int] = set()
    found = []
    for number, leaf in enumerate(answers):
        if id(leaf) in inner:
            continue
        # the answers that are trained on here, by temperature
        counted: dict[float, list[Node]] = {}
        for node in leaf.path():
            if node.answer is None or id(node) in taken:
                continue
            params = node.answer.sampling_params
            # only if a trainer can compute the log-probs of what was sampled with them
            if all(params.get(name) in values for name, values in CHANGES_NOTHING.items()):
                temperature = float(sampling_entry(params, None, 0, 0, None, None)["temperature"])
                counted.setdefault(temperature, []).append(node)
                if shared == "first":
                    taken.add(id(node))
        found += [(_trajectory(leaf, nodes, value), number) for value, nodes in counted.items()]
    return found


def _trajectory(leaf: Node, counted: Sequence[Node], temperature: float) -> TensorDict:
    """Return the trajectory of a leaf's path, to be trained on some of its answers."""
    total, prompt, trained = leaf.stop, counted[0].start, set(map(id, counted))
    full = torch.from_numpy(leaf.path_ids()).long()
    mask = torch.zeros(total, dtype=torch.bool)
    log_probs = torch.full((total,), float("nan"))
    versions = torch.full((total,), NO_VERSION, dtype=torch.int32)
    sizes, ids = torch.zeros(total, dtype=torch.int32), [torch.zeros(0, dtype=torch.int32)]
    leaves_out, answers = False, [(node, node.answer) for node in leaf.path() if node.answer is not None]
    for node, answer in answers:
        span = slice(node.start, node.stop)
        versions[span] = torch.from_numpy(answer.versions)
        if id(node) not in trained:
            continue
        mask[span], log_probs[span] = True, torch.from_numpy(answer.log_probs)
        leaves_out |= answer.kept is not None or bool(leaves_ids_out(answer.sampling_params.get))
        if answer.kept is not None:
            sizes[span] = torch.from_numpy(answer.kept.sizes)
            ids.append(torch.from_numpy(answer.kept.ids))
    sampling = TensorDict({"temperature": torch.tensor(temperature)})
    if leaves_out:
        sampling["kept"] = KeptTokens(ids=torch.cat(ids), sizes=sizes)
    last = answers[-1][1]
    source: dict[str, object] = {
        "tokens": _unpadded(Tokens, prompt=full[:prompt].clone(), response=full[prompt:].clone(), full=full),
        "masks": _unpadded(Masks, all_attention_mask=torch.ones_like(mask), all_assistant_mask=mask),
        "log_probs": _unpadded(LogProbs, response=log_probs[prompt:].clone(), full=log_probs),
        "policy_versions": TensorDict({"full": versions}),
        "policy_version": versions[mask].min().long(),
        "num_segments": torch.tensor(num_segments(versions[mask])),
        "num_cached_tokens": torch.tensor(last.num_cached_tokens),
        "resume": NonTensorData(worst_resume(*(answer.resume for _, answer in answers))),
        "finish_reason": NonTensorData(last.finish_reason),
        SAMPLING: sampling,
    }
    if leaf.routes is not None:
        source["routed_experts"] = RoutedExperts(full=torch.from_numpy(leaf.path_routes()))
    return TensorDict(source)


def _unpadded(kind: type[TensorClass], **tensors: Tensor) -> TensorClass:
    return kind.from_tensordict(TensorDict({**tensors, "padded": NonTensorData(False)}))


# -- files ------------------------------------------------------------------------------------------------------------


def to_safetensors(trajectories: Sequence[tuple[TensorDict, int]], routes: bool) -> bytes:
    """Return trajectories as a file, with or without their routes."""
    tensors, plain = {}, {}
    for i, (td, answer) in enumerate(trajectories):
        if not routes and "routed_experts" in td.keys():  # noqa: SIM118  a TensorDict iterates over its batch
            td = td.exclude("routed_experts").set(ROUTES_OF, torch.tensor(answer))
        for key, value in td.items(True, True, is_leaf=is_leaf_nontensor):
            name = ".".join([str(i), *((key,) if isinstance(key, str) else key)])
            if isinstance(value, Tensor):
                tensors[name] = value.clone()  # parts of one array would be refused, as shared memory
            elif isinstance(value, NonTensorData) and isinstance(value.data, str):
                plain[name] = value.data
    return safetensors.torch.save(tensors, {"count": str(len(trajectories)), "plain": json.dumps(plain)})


def load_trajectories(data: bytes, routes: Callable[[int], bytes] | None = None) -> list[TensorDict]:
    """Read what :meth:`Session.to_safetensors` wrote: the same TensorDicts, bit for bit.

    Args:
        data: the file.
        routes: returns what :meth:`Session.routes_to_safetensors` writes for an answer's number, for a file without
            routes; ``None``: its trajectories have none, and the number is at ``"routes_of"``.

    Raises:
        ValueError: this is no such file.
    """
    try:
        tensors: dict[str, Any] = safetensors.torch.load(data)
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + length])["__metadata__"]
        count, plain = int(metadata["count"]), json.loads(metadata["plain"])
    except (KeyError, ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"these {len(data)} bytes are not the trajectories of a session: {error}") from error
    found = [TensorDict() for _ in range(count)]
    for name, value in (tensors | plain).items():
        i, *key = name.split(".")
        found[int(i)][tuple(key)] = NonTensorData(value) if isinstance(value, str) else value
    for td in found:
        if routes is not None and ROUTES_OF in td.keys():  # noqa: SIM118  a TensorDict iterates over its batch
            td["routed_experts", "full"] = safetensors.torch.load(routes(int(td.pop(ROUTES_OF))))["routes"]
        for key, kind in CLASSES.items():
            if (entry := td.get(key, None)) is not None:
                is_padded = {"padded": NonTensorData(False)} if "padded" in kind.__annotations__ else {}
                td[key] = kind.from_tensordict(entry.update(is_padded))
    return found
