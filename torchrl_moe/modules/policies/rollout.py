"""From completions to TensorDicts: one per answer, stacked lazily or padded. The keys are those of docs/loop.md.

Letters: P prompt tokens, G response tokens, T = P + G, L decoder layers, K experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NonTensorData, TensorClass, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens

from torchrl_moe.data import UNSET_EXPERT, KeptTokens, RoutedExperts, RoutingLayout
from torchrl_moe.data.kept_tokens import select_rows
from torchrl_moe.data.routed_experts import routes_from_vllm
from torchrl_moe.data.segments import first_writer_wins, num_segments, shared_prefix, worst_resume
from torchrl_moe.modules.backends.replica import Completion, CompletionOutput, KeptIds, leaves_ids_out

# The entry ``"sampling"`` of a rollout, which records how it was sampled: the temperature and the kept tokens.
#
# Letters: P prompt tokens, G response tokens, T = P + G.


SAMPLING = "sampling"
CHANGES_NOTHING: Mapping[str, tuple[object, ...]] = {
    "repetition_penalty": (None, 1, 1.0),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "logit_bias": (None, {}),
    "thinking_token_budget": (None,),  # the end of thinking gets a logit of 1e9, but no other logit is -inf
}
"""Sampling parameters that change logits -> values that switch them off."""
LEAST_TEMPERATURE = 0.01
"""vLLM samples at this temperature if a lower one is requested, except for 0."""


def refuse_changed_values(params: Mapping[str, Any]) -> None:
    """Refuse sampling parameters with which no trainer can compute the engine's log-probs."""
    for name, values in CHANGES_NOTHING.items():
        if params.get(name) not in values:
            raise ValueError(
                f"{name}={params[name]!r} changes logits, and log-probs with it, in a way that a trainer does not "
                "replay: leave it out, or pass return_log_probs=False"
            )


def check_earlier_turn(params: Mapping[str, Any], earlier: TensorDictBase, real: Tensor) -> None:
    """Refuse a turn whose answer could not be scored together with the previous turn, which its prompt repeats."""
    # compared as it is stored, in float32
    now, first = _temperature(params), earlier.get((SAMPLING, "temperature"), None)
    names_ids = params.get("logprobs") is not None
    if names_ids and first is not None and float(first) != float(torch.tensor(now)):
        raise ValueError(
            f"this turn's temperature is {now:g}, that of the turn before {float(first):g}, and a sample is scored at "
            "one: sample all turns alike, or pass return_log_probs=False"
        )
    kept = earlier.get((SAMPLING, "kept"), None)
    if kept is not None and len(kept.get("sizes")) != len(real):
        raise ValueError(
            f"('{SAMPLING}', 'kept') of the turn before is for {len(kept.get('sizes'))} tokens, and it has "
            f"{len(real)}: both must have been cut or padded alike"
        )


def sampling_entry(
    params: Mapping[str, Any],
    kept: KeptIds | None,
    prompt: int,
    total: int,
    earlier: TensorDictBase | None,
    real: Tensor | None,
) -> TensorDict:
    """Return the entry of one answer."""
    source: dict[str, object] = {"temperature": torch.tensor(_temperature(params))}
    before = None if earlier is None else earlier.get((SAMPLING, "kept"), None)
    names_ids = params.get("logprobs") is not None  # otherwise it is unknown which were kept
    if kept is not None or before is not None or (names_ids and leaves_ids_out(params.get)):
        # a prompt token has size 0: all tokens of the vocabulary count
        own = KeptTokens(ids=torch.zeros(0, dtype=torch.int32), sizes=torch.zeros(total, dtype=torch.int32))
        if kept is not None:
            own.ids = torch.from_numpy(kept.ids.copy())
            own.sizes[prompt:] = torch.from_numpy(kept.sizes.copy())
        if before is not None and real is not None:
            # the earlier turn's pads go, for this turn has none
            ids, sizes = select_rows(before.get("ids").cpu(), before.get("sizes").cpu(), real.cpu())
            own = KeptTokens(ids=ids, sizes=sizes).followed_by(own)
        source["kept"] = own
    return TensorDict(source)


def _temperature(params: Mapping[str, Any]) -> float:
    given = params.get("temperature")
    value = 1.0 if given is None else float(given)
    return max(value, LEAST_TEMPERATURE) if value > 0 else value


def pad_sampling(entries: Sequence[TensorDictBase], prompts: Sequence[int], totals: Sequence[int]) -> TensorDict:
    """Return the entries of a batch, tokens padded around the border between prompt and response."""
    found = TensorDict({"temperature": torch.stack([entry["temperature"] for entry in entries])}, [len(entries)])
    kept = [entry.get("kept", None) for entry in entries]
    if all(one is None for one in kept):
        return found
    nothing = torch.zeros(0, dtype=torch.int32)
    ids = [nothing if one is None else one.ids for one in kept]
    sizes = [nothing.new_zeros(n) if one is None else one.sizes for one, n in zip(kept, totals, strict=True)]
    found["kept"] = KeptTokens(
        ids=_pad(ids, [0] * len(ids), -1), sizes=_pad(sizes, prompts, 0), batch_size=[len(entries)]
    )
    return found


NO_VERSION = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutKeys:
    """The keys that the wrapper writes; ``None`` omits an entry."""

    tokens: str = "tokens"
    masks: str = "masks"
    log_probs: str | None = "log_probs"
    routed_experts: str | None = "routed_experts"


def _unpadded(kind: type[TensorClass], **tensors: Tensor) -> TensorClass:
    """Return a TensorClass of one answer; its constructor, called once per field, costs five times as much."""
    return kind.from_tensordict(TensorDict({**tensors, "padded": NonTensorData(False)}))


def check_prompts(
    prompts: Sequence[Sequence[int]],
    keys: RolloutKeys,
    params: Mapping[str, Any],
    inputs: Sequence[TensorDictBase],
) -> None:
    """Refuse prompts whose answers :func:`answer_tensordict` could not join to an earlier turn."""
    for prompt, earlier in zip(prompts, inputs, strict=True):
        if earlier.get(SAMPLING, None) is not None:
            real = repeated(earlier, torch.tensor(prompt), keys)
            if real is not None:
                check_earlier_turn(params, earlier, real)


def answer_tensordict(
    completion: Completion,
    output: CompletionOutput,
    layout: RoutingLayout | None,
    keys: RolloutKeys,
    params: Mapping[str, Any],
    earlier: TensorDictBase | None = None,
    routes: Tensor | None = None,
) -> TensorDict:
    """Return the TensorDict of one answer, batch size ``[]``.

    Its routes ``[T, L, K]`` are given, or an engine's, which are read by its ``layout``.
    """
    prompt = torch.from_numpy(completion.prompt_token_ids.copy())
    response = torch.from_numpy(output.token_ids.copy())
    full = torch.cat([prompt, response])
    begin, total = len(prompt), len(full)
    # what this turn knows of every token, by key: [T, ...]
    versions = torch.full((total,), NO_VERSION, dtype=torch.int32)
    versions[begin:] = torch.from_numpy(output.policy_versions.copy())
    per_token = {"policy_versions": versions}
    if keys.log_probs is not None:
        if output.logprobs is None:
            raise ValueError("the engine returned no log-probs: leave generate_kwargs['logprobs'] out, or set it to 0")
        log_probs = torch.full((total,), float("nan"))
        log_probs[begin:] = torch.from_numpy(output.logprobs.copy())
        per_token[keys.log_probs] = log_probs
    if keys.routed_experts is not None and layout is not None:
        routes = torch.from_numpy(routes_from_vllm(output.routed_experts, total, layout))
    if keys.routed_experts is not None and routes is not None:
        per_token[keys.routed_experts] = routes
    # then what an earlier turn knew before it, and the worst way in which either re-read what was before it
    resume: str = output.resume
    real = None if earlier is None else repeated(earlier, prompt, keys)
    if earlier is not None and real is not None:
        for key, later in per_token.items():
            known = earlier.get((key, "full"), None)
            if known is not None and len(known) == len(real):
                per_token[key] = first_writer_wins(known[real].to(later), later)
        before = earlier.get("resume", "none")
        resume = worst_resume(resume, getattr(before, "data", before))
    versions = per_token["policy_versions"]
    assistant = torch.arange(total) >= begin
    # the tokens themselves, with masks, and how the answer came to its end
    source: dict[str, object] = {
        keys.tokens: _unpadded(Tokens, prompt=prompt, response=response, full=full),
        keys.masks: _unpadded(Masks, all_attention_mask=torch.ones_like(assistant), all_assistant_mask=assistant),
        "policy_versions": TensorDict({"full": versions}),
        # the oldest weights that made a part of the response
        "policy_version": versions[begin:].min().long() if len(response) else torch.tensor(NO_VERSION),
        "num_segments": torch.tensor(num_segments(versions)),
        "resume": NonTensorData(resume),
        "finish_reason": NonTensorData(output.finish_reason),
        "num_cached_tokens": torch.tensor(completion.num_cached_tokens),
        SAMPLING: sampling_entry(params, output.kept, begin, total, None if real is None else earlier, real),
    }
    if keys.log_probs is not None:
        values = per_token[keys.log_probs]
        source[keys.log_probs] = _unpadded(LogProbs, response=values[begin:].clone(), full=values)
    if keys.routed_experts in per_token:
        source[str(keys.routed_experts)] = RoutedExperts(full=per_token[str(keys.routed_experts)])
    return TensorDict(source)


def repeated(earlier: TensorDictBase, prompt: Tensor, keys: RolloutKeys) -> Tensor | None:
    """Return which tokens of an earlier turn are real, if ``prompt`` begins with all of them, prompt and response.

    A response that is merely generated identically again, on the same input or after a reset, belongs to this turn.
    """
    ids = earlier.get((keys.tokens, "full"), None)
    if ids is None:
        return None
    # an earlier turn may be padded, and the prompt never is
    mask = earlier.get((keys.masks, "all_attention_mask"), None)
    real = mask.bool() if mask is not None and mask.shape == ids.shape else torch.ones_like(ids, dtype=torch.bool)
    return real if shared_prefix(ids[real].cpu(), prompt) else None


def flat_samples(tensordict: TensorDictBase) -> list[TensorDictBase]:
    """Return every sample in order, for any batch size; writing to a sample of a lazy stack writes to the stack."""
    if not tensordict.ndim:
        return [tensordict]
    if tensordict.ndim == 1:
        return list(tensordict.unbind(0))
    return [sample for part in tensordict.unbind(0) for sample in flat_samples(part)]


def stack_answers(answers: Sequence[TensorDictBase], shape: Sequence[int]) -> TensorDictBase:
    """Stack answers lazily to batch size ``shape``, the last dimension first; ``()`` gives the only answer itself."""
    if not shape:
        (answer,) = answers
        return answer
    step = math.prod(shape[1:])
    return lazy_stack([stack_answers(answers[i : i + step], shape[1:]) for i in range(0, len(answers), step)])


def pad_answers(
    answers: Sequence[TensorDictBase], pad_token_id: int, keys: RolloutKeys, shape: Sequence[int]
) -> TensorDict:
    """Stack answers densely to batch size ``shape``: prompts padded left, responses right, ``full`` on both sides.

    Sequences without a prompt and a response, such as those that are only scored, are padded left.
    """
    # a padded log-prob is 0, as in TorchRL: NaN there would poison a masked mean
    pads = {
        keys.tokens: pad_token_id,
        keys.masks: False,
        keys.log_probs: 0.0,
        keys.routed_experts: UNSET_EXPERT,
        "policy_versions": NO_VERSION,
    }
    totals = [len(answer.get((keys.tokens, "full"))) for answer in answers]
    firsts = [answer.get((keys.tokens, "prompt"), None) for answer in answers]
    prompts = [total if first is None else len(first) for first, total in zip(firsts, totals, strict=True)]
    batch = [len(answers)]
    padded = TensorDict(batch_size=batch)
    for key in answers[0].keys():  # noqa: SIM118  a TensorDict iterates over its batch
        values = [answer.get(key) for answer in answers]
        if key == SAMPLING:
            padded.set(key, pad_sampling(values, prompts, totals))
            continue
        if key not in pads:
            padded.set(key, torch.stack(values) if isinstance(values[0], Tensor) else lazy_stack(values))
            continue
        entry = TensorDict(batch_size=batch)
        for leaf in values[0].keys():  # noqa: SIM118
            rows = [value.get(leaf) for value in values]
            if isinstance(rows[0], Tensor):
                # a response begins in column 0, a prompt ends where the longest one does
                entry.set(leaf, _pad(rows, [0] * len(rows) if leaf == "response" else prompts, pads[key]))
        if not isinstance(values[0], TensorDictBase):  # a TensorClass: TorchRL's say whether they are padded
            entry = type(values[0]).from_tensordict(entry)
            if hasattr(values[0], "padded"):
                entry.padded = True
        padded.set(key, entry)
    if len(shape) == 1:
        return padded
    return padded.unflatten(0, shape) if shape else padded[0]


def _pad(rows: Sequence[Tensor], borders: Sequence[int], value: float) -> Tensor:
    """Pad ``[T, ...]`` rows to ``[B, T, ...]`` so that all have the border of prompt and response in one column."""
    left = max(borders)
    right = max(len(row) - border for row, border in zip(rows, borders, strict=True))
    padded = rows[0].new_full((len(rows), left + right, *rows[0].shape[1:]), value)
    for i, (row, border) in enumerate(zip(rows, borders, strict=True)):
        padded[i, left - border : left - border + len(row)] = row
    return padded
