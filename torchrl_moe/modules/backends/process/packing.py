"""How requests and completions are packed: one flat array per field for a whole batch, and the rest as rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchrl_moe.modules.backends.kept_ids import KeptIds
from torchrl_moe.modules.backends.process.plain import Packed, from_plain, to_plain
from torchrl_moe.modules.backends.replica import Completion, CompletionMetrics, CompletionOutput, Request, Scoring

__all__ = [
    "NOWHERE",
    "completion_bytes",
    "pack_completions",
    "pack_requests",
    "packed_ids",
    "rename",
    "unpack_completions",
    "unpack_requests",
]


NOWHERE = -1  # the replica of a completion that none has finished


def _concatenate(arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.empty(0, dtype)


def _split(flat: NDArray[Any], lengths: NDArray[np.int64]) -> list[NDArray[Any]]:
    """Split into copies: a piece that is kept must not keep the whole message alive."""
    stops = np.cumsum(lengths)
    return [flat[stop - length : stop].copy() for stop, length in zip(stops.tolist(), lengths.tolist(), strict=True)]


def packed_ids(packed: Packed) -> list[str]:
    """Return the request ids of packed requests or completions, in order."""
    return [row[0] for row in packed["rest"]]


def rename(packed: Packed, name: Callable[[str], str]) -> Packed:
    """Return packed requests or completions under other request ids; the arrays are shared."""
    return Packed({**packed, "rest": [(name(row[0]), *row[1:]) for row in packed["rest"]]})


def pack_requests(requests: Sequence[Request]) -> Packed:
    """Flatten requests; a prompt given as text has length -1 in ``lengths``. What requests share is sent once.

    Raises:
        ValueError: something that a user passed with one has no plain form.
    """
    ids = [request.prompt_token_ids for request in requests]
    options = [(request.sampling_params, request.lora_request, request.guided_options) for request in requests]
    keys = [tuple(map(id, of_one)) for of_one in options]
    distinct = dict(zip(keys, options, strict=True))
    places = {key: place for place, key in enumerate(distinct)}
    resumed = {i: request.resume for i, request in enumerate(requests) if request.resume is not None}
    return Packed(
        ids=_concatenate([row for row in ids if row is not None], np.int32),
        lengths=np.array([-1 if row is None else len(row) for row in ids], np.int64),
        rest=[(r.request_id, r.prompt, r.priority, r.return_routed_experts, r.on_resume) for r in requests],
        scoring={i: _pack_scoring(r.scoring) for i, r in enumerate(requests) if r.scoring is not None},
        forced={i: r.routed_experts for i, r in enumerate(requests) if r.routed_experts is not None},
        options=to_plain(list(distinct.values())),
        places=[places[key] for key in keys],
        resumed=list(resumed),
        resume=dict(pack_completions(list(resumed.values()))) if resumed else None,
    )


def unpack_requests(packed: Packed) -> list[Request]:
    """Undo :func:`pack_requests`; requests that shared their parameters share them again."""
    lengths = packed["lengths"]
    ids = iter(_split(packed["ids"], lengths[lengths >= 0]))
    options = from_plain(packed["options"])
    given = unpack_completions(packed["resume"], NOWHERE) if packed["resumed"] else []
    resumed = dict(zip(packed["resumed"], given, strict=True))
    requests = []
    rows = zip(lengths.tolist(), packed["rest"], packed["places"], strict=True)
    for i, (length, row, place) in enumerate(rows):
        request_id, prompt, priority, routes, on_resume = row
        params, lora, guided = options[place]
        requests.append(
            Request(
                request_id=request_id,
                sampling_params=params,
                prompt_token_ids=next(ids) if length >= 0 else None,
                prompt=prompt,
                priority=priority,
                lora_request=lora,
                guided_options=guided,
                return_routed_experts=routes,
                resume=resumed.get(i),
                routed_experts=packed["forced"].get(i),
                scoring=_unpack_scoring(packed["scoring"].get(i)),
                on_resume=on_resume,
            )
        )
    return requests


def _pack_scoring(scoring: Scoring) -> tuple[Any, ...]:
    kept = scoring.kept
    return (scoring.temperature, *(() if kept is None else (kept.ids, kept.sizes)))


def _unpack_scoring(packed: Sequence[Any] | None) -> Scoring | None:
    if packed is None:
        return None
    temperature, *kept = packed
    return Scoring(temperature=temperature, kept=KeptIds(*kept) if kept else None)


def pack_completions(completions: Sequence[Completion]) -> Packed:
    """Flatten completions. All routes of one engine share ``[L, K]`` and dtype, so they concatenate along rows."""
    outputs = [output for completion in completions for output in completion.outputs]
    logprobs = [output.logprobs for output in outputs]
    routes = [output.routed_experts for output in outputs]
    kept = [rows for rows in routes if rows is not None]
    words = [output.kept for output in outputs]
    return Packed(
        prompt_ids=_concatenate([c.prompt_token_ids for c in completions], np.int32),
        prompt_lengths=np.array([len(c.prompt_token_ids) for c in completions], np.int64),
        ids=_concatenate([o.token_ids for o in outputs], np.int32),
        lengths=np.array([len(o.token_ids) for o in outputs], np.int64),
        versions=_concatenate([o.policy_versions for o in outputs], np.int32),
        logprobs=_concatenate([row for row in logprobs if row is not None], np.float32),
        kept_ids=_concatenate([k.ids for k in words if k is not None], np.int32),
        kept_sizes=_concatenate([k.sizes for k in words if k is not None], np.int32),
        kept_lengths=np.array([-1 if k is None else len(k.ids) for k in words], np.int64),
        has_logprobs=[row is not None for row in logprobs],
        routes=np.concatenate(kept) if kept else None,
        route_lengths=np.array([-1 if rows is None else len(rows) for rows in routes], np.int64),
        outputs=[(o.index, o.text, o.finish_reason, o.stop_reason, o.resume) for o in outputs],
        scores=_concatenate([c.prompt_logprobs for c in completions if c.prompt_logprobs is not None], np.float32),
        has_scores=[c.prompt_logprobs is not None for c in completions],
        rest=[
            (
                c.request_id,
                c.prompt,
                c.num_cached_tokens,
                len(c.outputs),
                c.metrics.queue_seconds,
                c.metrics.first_token_seconds,
                c.metrics.total_seconds,
            )
            for c in completions
        ],
    )


def completion_bytes(completion: Completion) -> int:
    """Return how many bytes the arrays of a completion take."""
    arrays: list[NDArray[Any] | None] = [completion.prompt_token_ids, completion.prompt_logprobs]
    for output in completion.outputs:
        arrays += [output.token_ids, output.policy_versions, output.logprobs, output.routed_experts]
        arrays += [] if output.kept is None else [output.kept.ids, output.kept.sizes]
    return sum(array.nbytes for array in arrays if array is not None)


def unpack_completions(packed: Packed, replica: int) -> list[Completion]:
    """Undo :func:`pack_completions`; ``replica`` is stamped on the metrics."""
    outputs = iter(_unpack_outputs(packed))
    prompts = _split(packed["prompt_ids"].astype(np.int64), packed["prompt_lengths"])
    scored = np.array(packed["has_scores"], bool)
    scores = iter(_split(packed["scores"], packed["prompt_lengths"][scored]))
    completions = []
    for prompt_ids, has_scores, (request_id, prompt, cached, count, queued, first, total) in zip(
        prompts, packed["has_scores"], packed["rest"], strict=True
    ):
        metrics = CompletionMetrics(
            queue_seconds=queued, first_token_seconds=first, total_seconds=total, replica=replica
        )
        completions.append(
            Completion(
                request_id=request_id,
                prompt=prompt,
                prompt_token_ids=prompt_ids,
                num_cached_tokens=cached,
                outputs=[next(outputs) for _ in range(count)],
                metrics=metrics,
                prompt_logprobs=next(scores) if has_scores else None,
            )
        )
    return completions


def _unpack_outputs(packed: Packed) -> list[CompletionOutput]:
    lengths, route_lengths = packed["lengths"], packed["route_lengths"]
    ids = _split(packed["ids"].astype(np.int64), lengths)
    versions = _split(packed["versions"], lengths)
    logprobs = iter(_split(packed["logprobs"], lengths[np.array(packed["has_logprobs"], bool)]))
    kept = route_lengths[route_lengths >= 0]
    routes = iter(_split(packed["routes"], kept) if len(kept) else ())
    named = packed["kept_lengths"]
    words = zip(
        _split(packed["kept_ids"], named[named >= 0]), _split(packed["kept_sizes"], lengths[named >= 0]), strict=True
    )
    return [
        CompletionOutput(
            index=index,
            token_ids=ids[i],
            text=text,
            finish_reason=finish_reason,
            policy_versions=versions[i],
            logprobs=next(logprobs) if packed["has_logprobs"][i] else None,
            routed_experts=next(routes) if route_lengths[i] >= 0 else None,
            stop_reason=stop_reason,
            kept=KeptIds(*next(words)) if named[i] >= 0 else None,
            resume=resume,
        )
        for i, (index, text, finish_reason, stop_reason, resume) in enumerate(packed["outputs"])
    ]
