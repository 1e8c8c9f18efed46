"""From the arguments of one ``generate`` call to the requests of replicas, and where each may go."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, TypeAlias, TypeGuard, TypeVar, cast, get_args

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrl_moe._checks import check_bool, check_instance, check_number, check_routes, shown
from torchrl_moe.data import KeptTokens, RoutingLayout
from torchrl_moe.errors import EngineError, RouteValueError
from torchrl_moe.modules.backends.replica import Completion, CompletionOutput, KeptIds, OnResume, Request, Scoring
from torchrl_moe.modules.backends.request_routes import rows_of_answer
from torchrl_moe.modules.backends.sampling_fields import check_answers, check_fields, check_object, check_text
from torchrl_moe.modules.serving.replica_table import FaultPolicy

if TYPE_CHECKING:
    import vllm
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams


# What ``generate`` accepts, in one form: a list of prompts, each text, token ids, or a completion to resume.
#
# vLLM and TorchRL users pass strings, token lists, arrays, tensors, ``TextPrompt``/``TokensPrompt`` dictionaries, and
# lists of each; the rules for what counts as one prompt are here and nowhere else.


Prompt = str | NDArray[np.int32] | Completion
SamplingParams: TypeAlias = "Mapping[str, object] | vllm.SamplingParams"
LoRA: TypeAlias = "Mapping[str, object] | LoRARequest"
GuidedOptions: TypeAlias = "Mapping[str, object] | StructuredOutputsParams"
FINISH_REASONS = ("abort", "length", "stop", "repetition")  # vLLM's
LARGEST_ID = int(np.iinfo(np.int32).max)


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Prompts in input order. ``single`` says that the caller passed one prompt, not a list, and gets one answer."""

    prompts: list[Prompt]
    single: bool


def normalise_prompts(prompts: object = None, prompt_token_ids: object = None, resume: object = None) -> PromptBatch:
    """Bring the three ways of passing prompts to one form. A list of ints is one prompt.

    >>> normalise_prompts("hi").single, normalise_prompts([1, 2]).single, normalise_prompts([[1, 2]]).single
    (True, True, False)
    """
    ways = (("prompts", prompts), ("prompt_token_ids", prompt_token_ids), ("resume", resume))
    given = [way for way in ways if way[1] is not None]
    if len(given) > 1:
        raise ValueError(f"cannot specify both {' and '.join(name for name, _ in given)}: pass one of them")
    if not given:
        raise ValueError("must specify either prompts or prompt_token_ids, or resume")
    ((name, source),) = given
    if resume is not None:
        return _completions(resume)
    if isinstance(source, str | Mapping):
        is_one = True
    elif hasattr(source, "ndim"):
        is_one = source.ndim == 1
    else:
        is_one = isinstance(source, Sequence) and len(source) > 0 and isinstance(source[0], int | np.integer)
    if is_one:
        return PromptBatch([_prompt(source, name)], single=True)
    if not _is_list(source):
        raise TypeError(f"{name} must be text, token ids or a list of them, got {type(source).__name__}")
    if not len(source):
        raise ValueError(f"{name} cannot be empty")
    return PromptBatch([_prompt(item, f"{name}[{i}]") for i, item in enumerate(source)], single=False)


def _completions(resume: object) -> PromptBatch:
    single = isinstance(resume, Completion)
    given = [resume] if single else resume
    wanted = "resume must be a Completion or a list of them, such as an error's .partial, got"
    if not isinstance(given, list | tuple):
        raise TypeError(f"{wanted} {type(resume).__name__}")
    if not given:
        raise ValueError("resume cannot be empty: the error that it is from did not end a generate")
    for i, item in enumerate(given):
        if not isinstance(item, Completion):
            raise TypeError(f"{wanted} a list with {type(item).__name__} at {i}")
        if not item.outputs or (item.prompt is None and not len(item.prompt_token_ids)):
            raise ValueError(f"resume[{i}] has no {'prompt' if item.outputs else 'answer'}")
        if len(item.prompt_token_ids):
            _ids(item.prompt_token_ids, f"resume[{i}], prompt")
        for output in item.outputs:
            if len(output.token_ids):
                _ids(output.token_ids, f"resume[{i}], answer {output.index}")
            if output.finish_reason not in FINISH_REASONS:  # else it would count as complete
                raise ValueError(
                    f"resume[{i}], answer {output.index}: finish_reason must be one of {', '.join(FINISH_REASONS)}, "
                    f"got {output.finish_reason!r}"
                )
        # an engine could not read a value of another type, nor what came with it
        try:
            msgspec.convert(_plain(item), Completion)
        except msgspec.ValidationError as error:
            raise ValueError(f"resume[{i}]: {error}") from None
    return PromptBatch(list(given), single)


def _plain(value: Any) -> Any:
    """Return a completion as msgspec reads a message: it would take an instance as it is."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    return value.item() if isinstance(value, np.generic) else value


def _prompt(item: object, name: str) -> Prompt:
    if isinstance(item, list):  # the usual case, and the slowest to test for other types
        return _ids(item, name)
    if isinstance(item, Mapping):
        keys = [key for key in ("prompt_token_ids", "prompt") if item.get(key) is not None]
        if not keys:
            raise TypeError(f"{name} has neither 'prompt_token_ids' nor 'prompt'; its keys are {sorted(item)}")
        return _prompt(item[keys[0]], f"{name}[{keys[0]!r}]")
    if isinstance(item, str):
        if not item:
            raise ValueError(f"{name} is an empty prompt")
        if "prompt_token_ids" in name:
            raise TypeError(f"{name} must be token ids, got {shown(item)}: pass text as prompts")
        check_text(name, item)
        return item
    if not hasattr(item, "ndim") and not isinstance(item, Sequence):
        raise TypeError(f"{name} must be text or token ids, got {type(item).__name__}")
    return _ids(item, name)


def _ids(item: Any, name: str) -> NDArray[np.int32]:
    if not hasattr(item, "ndim") and not {bool, np.bool_}.isdisjoint(map(type, item)):  # numpy takes True for 1
        at, bad = next((i, one) for i, one in enumerate(item) if isinstance(one, bool | np.bool_))
        raise TypeError(f"{name} must be a flat list of integer token ids, got {bad} at {at}")
    try:
        ids = np.asarray(item.cpu() if isinstance(item, torch.Tensor) else item)
    except (TypeError, ValueError) as error:  # a dtype unknown to numpy, or rows of different lengths
        raise TypeError(f"{name} must be a flat list of integer token ids: {error}") from error
    if ids.size == 0:
        raise ValueError(f"{name} is an empty prompt")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise TypeError(f"{name} must be a flat list of integer token ids, got shape {ids.shape} of {ids.dtype}")
    least, most = np.minimum.reduce(ids), np.maximum.reduce(ids)
    if least < 0:
        raise ValueError(f"{name} holds the negative token id {least}; take padding out first")
    if most > LARGEST_ID:
        raise ValueError(f"{name} holds the token id {most}; the largest possible one is {LARGEST_ID}")
    return ids.astype(np.int32)


# Resuming completions: the requests for them, the checks, and those that need no engine.
#
# Letters: P prompt tokens, G tokens so far, L decoder layers, K experts per token.


def whole(request: Request) -> Completion | None:
    given = request.resume
    return None if given is None or given.aborted else given


def check_resume(request: Request, position: int, layout: RoutingLayout | None) -> None:
    """Check that a completion to resume fits the engine's routers and the request's parameters."""
    given = request.resume
    if given is None or whole(request) is not None:
        return
    answers = request.param("n") or 1
    if [output.index for output in given.outputs] != list(range(answers)):
        raise ValueError(
            f"resume[{position}] has {len(given.outputs)} answers, but sampling_params ask for n={answers}: pass those "
            "that it started with"
        )
    for output in given.outputs:
        if len(output.token_ids) and (wrong := _wrong(request, given, output, layout)):
            raise ValueError(f"resume[{position}], answer {output.index}: {wrong}")


def _wrong(request: Request, given: Completion, output: CompletionOutput, layout: RoutingLayout | None) -> str:
    tokens, prompt, kept = len(output.token_ids), len(given.prompt_token_ids), output.kept
    values = {
        "policy_versions": output.policy_versions,
        "logprobs": output.logprobs,
        "kept": None if kept is None else kept.sizes,
    }
    lengths = {name: len(value) for name, value in values.items() if value is not None}
    if not prompt or any(length != tokens for length in lengths.values()):
        return f"no completion of an engine: {prompt} prompt tokens, {tokens} tokens, lengths {lengths}"
    if kept is not None and (said := int(np.abs(kept.sizes).sum())) != len(kept.ids):
        return f"no completion of an engine: it has {len(kept.ids)} kept ids, and their sizes say {said}"
    if output.logprobs is None and request.param("logprobs") is not None:
        return "it has no log-probs, which sampling_params ask for: pass those that it started with"
    if layout is None or not request.return_routed_experts:
        return ""
    # a stream tells tokens before their routes: if its replica died, the engine reads again what has none
    rows = output.routed_experts
    may_lack = output.finish_reason == "abort" and request.on_resume != "forced"
    if rows is None:
        return "" if may_lack else "it has no routes: pass return_routed_experts=False, as when it started"
    expected = (prompt + tokens - 1, layout.num_layers, layout.top_k)
    if rows.shape[1:] != expected[1:] or len(rows) > expected[0] or (len(rows) < expected[0] and not may_lack):
        return f"its routes have shape {list(rows.shape)}, but this engine gives {list(expected)}"
    if rows.dtype.kind not in "ui" or (rows.size and not 0 <= rows.min() <= rows.max() < layout.num_experts):
        held = f"{rows.min()}..{rows.max()}" if rows.size else "none"
        return f"its routes are {held} of {rows.dtype}, but this engine has experts 0..{layout.num_experts - 1}"
    try:
        check_routes(torch.from_numpy(rows_of_answer(rows, layout)), layout.moe_layers, layout.num_experts)
    except RouteValueError as error:
        return str(error)
    return ""


T = TypeVar("T")
MOST_BYTES = 1 << 31  # of routes: a million tokens of the largest models
MOST = 2**31 - 1  # of a priority: engines compare them with times


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a request may go: a replica by its index, the version it needs, and the context for strategies."""

    actor_index: int | None = None
    session_id: str | None = None
    min_version: int | None = None
    group_id: str | None = None
    request_context: Mapping[str, object] | None = None


def placements(
    count: int,
    *,
    actor_index: int | None = None,
    session_ids: object = None,
    min_version: object = None,
    group_ids: object = None,
    request_context: object = None,
) -> list[Placement]:
    check_number("actor_index", actor_index, whole=True, none=True)
    sessions = _for_each(session_ids, count, "session_ids", _name, is_name=True)
    versions = _for_each(min_version, count, "min_version", _version)
    groups = _for_each(group_ids, count, "group_ids", _name, is_name=True)
    contexts = _for_each(request_context, count, "request_context", _mapping)
    return [
        Placement(
            actor_index=actor_index, session_id=session, min_version=version, group_id=group, request_context=context
        )
        for session, version, group, context in zip(sessions, versions, groups, contexts, strict=True)
    ]


def make_requests(
    batch: PromptBatch,
    sampling_params: SamplingParams,
    *,
    new_ids: Iterator[str],
    longest: int | None,
    layout: RoutingLayout | None,
    request_ids: object = None,
    priority: object = 0,
    routed_experts: object = None,
    scoring: Sequence[Scoring] | None = None,
    lora_request: LoRA | None = None,
    guided_options: GuidedOptions | None = None,
    return_routed_experts: bool = True,
    on_resume: OnResume | None = None,
    stream: bool = False,
) -> list[Request]:
    """Return the requests of a call, checked; ``longest`` and ``layout``: the engine's ``max_model_len`` and routers.

    Ids that the caller did not give are taken from ``new_ids``.
    """
    count = len(batch.prompts)
    ids = request_ids_each(request_ids, count)
    # what all share
    check_fields(sampling_params, longest)
    check_answers(sampling_params, count)
    check_bool("return_routed_experts", return_routed_experts)
    check_object("lora_request", lora_request)
    check_object("guided_options_request", guided_options)
    if on_resume not in (None, *get_args(OnResume)):
        raise ValueError(f"on_resume must be None or one of {get_args(OnResume)}, got {on_resume!r}")
    common = Request(
        request_id="",
        sampling_params=sampling_params,
        lora_request=lora_request,
        guided_options=guided_options,
        return_routed_experts=return_routed_experts,
        on_resume=on_resume,
        stream=stream,
    )
    # what each has of its own
    turns, rows = integers(priority, count, "priority"), rows_each(routed_experts, batch)
    requests = []
    for position, prompt in enumerate(batch.prompts):
        request = make_request(
            prompt,
            common,
            request_id=next(new_ids) if ids is None else ids[position],
            priority=turns[position],
            routed_experts=rows[position],
            scoring=None if scoring is None else scoring[position],
        )
        if request.resume is not None and request.resume.aborted:
            check_resume(request, position, layout)
        requests.append(request)
    return requests


def make_request(prompt: Prompt, common: Request, **own: Any) -> Request:
    """Return the request of one prompt; a completion to resume that has no tokens starts from its prompt."""
    if isinstance(prompt, str):
        return replace(common, prompt=prompt, **own)
    if not isinstance(prompt, Completion):
        return replace(common, prompt_token_ids=prompt, **own)
    has_begun = not prompt.aborted or any(len(output.token_ids) for output in prompt.outputs)
    if prompt.prompt is not None and not has_begun:
        return replace(common, prompt=prompt.prompt, **own)
    ids = prompt.prompt_token_ids.astype(np.int32)
    return replace(common, prompt_token_ids=ids, resume=prompt if has_begun else None, **own)


def rows_each(values: object, batch: PromptBatch) -> list[NDArray[np.integer[Any]] | None]:
    """Return the routes that each prompt must follow: the array for one prompt, a list for several."""
    count = len(batch.prompts)
    if values is None:
        return [None] * count
    if not batch.single and not _is_list(values):
        raise TypeError(f"routed_experts must be a list with an entry per prompt, got {type(values).__name__}")
    given = [values] if batch.single else list(cast("Sequence[object]", values))
    if len(given) != count:
        raise ValueError(f"routed_experts must have one entry per prompt: got {len(given)} for {count} prompts")
    return [None if one is None else _rows(one, i) for i, one in enumerate(given)]


def _rows(value: object, position: int) -> NDArray[np.integer[Any]]:
    full = getattr(value, "full", value)
    try:
        rows = np.asarray(full.detach().cpu() if hasattr(full, "detach") else full)
    except (TypeError, ValueError, RuntimeError) as error:  # bfloat16, rows of different lengths, a meta tensor
        raise RouteValueError(f"routed_experts[{position}] must be an array of integers: {error}") from error
    if rows.dtype.kind not in "iu":
        kind = type(value).__name__ if rows.dtype.kind == "O" else f"{type(value).__name__} of {rows.dtype}"
        raise RouteValueError(f"routed_experts[{position}] must be an array of integers, got {kind}")
    if np.ma.is_masked(full):
        raise RouteValueError(f"routed_experts[{position}] has masked entries: fill them, with -1 where nothing is set")
    if rows.nbytes > MOST_BYTES:  # before a view of few bytes becomes as many
        raise RouteValueError(f"routed_experts[{position}] has {rows.nbytes} bytes, {MOST_BYTES} at most: {rows.shape}")
    return rows.astype(rows.dtype.newbyteorder("="), copy=False)


def request_ids_each(values: object, count: int) -> list[str] | None:
    if values is None:
        return None
    ids = _for_each(values, count, "request_ids", _request_id, is_name=True)
    if len(set(ids)) != count:
        raise ValueError("request_ids must differ from each other: an abort names a request by its id")
    return ids


def integers(value: object, count: int, name: str) -> list[int]:
    """Return one int of at most 31 bits per prompt: the same for all, or those of a list, array or tensor."""
    found = _for_each(value, count, name, _int)
    for one in found:
        check_number(name, one, -MOST, MOST, whole=True)
    return found


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    is_one = isinstance(value, str | bytes | Mapping)
    return not is_one and (isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0)


def _for_each(
    value: object, count: int, name: str, check: Callable[[object, str], T], *, is_name: bool = False
) -> list[T]:
    """Return a checked value per prompt: the one for all (a name only stands for one prompt), or those of a list."""
    is_list = _is_list(value)
    if value is None or not (is_list or is_name):
        return [check(value, name)] * count
    listed: Any = value if is_list else [value]
    listed = listed.tolist() if hasattr(listed, "tolist") else listed
    if len(listed) != count:
        raise ValueError(f"{name} must have one entry per prompt: got {len(listed)} for {count} prompts")
    return [check(one, f"{name}[{i}]") for i, one in enumerate(listed)]


def _int(value: object, name: str, kind: str = "an int") -> int:
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        with contextlib.suppress(TypeError):  # an array of several numbers
            return operator.index(value)
    raise TypeError(f"{name} must be {kind}, got {shown(value)}")


def _version(value: object, name: str) -> int | None:
    return None if value is None else _int(value, name)


def _name(value: object, name: str) -> str | None:
    return value if value is None or isinstance(value, str) else str(_int(value, name, "text, an int or None"))


def _request_id(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be text, got {shown(value)}")
    check_text(name, value)
    return value


def _mapping(value: object, name: str) -> Mapping[str, object] | None:
    if value is not None and not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping or None, got {value!r}")
    return value


def check_service(sampling_params: object, metrics: object, max_concurrent_requests: object, faults: object) -> None:
    """Raise ``ValueError`` for a setting of a service that is none, before anything is started for it."""
    check_fields(sampling_params)
    check_bool("metrics", metrics)
    if max_concurrent_requests != "auto":
        check_number("max_concurrent_requests", max_concurrent_requests, 1, whole=True, none=True, hint="Or 'auto'.")
    check_instance("faults", faults, FaultPolicy, none=True)


def check_timeout(seconds: float | None) -> float | None:
    """Return it, or raise ``ValueError`` if it is no positive number; an infinite one is no limit."""
    check_number("timeout_seconds", seconds, above=0, none=True, infinite=True)
    return None if seconds == math.inf else seconds


# A wrapper's sampling parameters, readable by attributes like vLLM's ``SamplingParams``.


class SamplingParameters(Mapping[str, Any]):
    """Fields of vLLM's ``SamplingParams`` that were given, as a mapping that does not change.

    Attributes read as those of vLLM's object; of a field that was not given, its default there.

    >>> params = SamplingParameters({"max_tokens": 8})
    >>> params.max_tokens, params["max_tokens"], "n" in params
    (8, 8, False)
    """

    __slots__ = ("_given",)

    def __init__(self, given: Mapping[str, object]) -> None:
        object.__setattr__(self, "_given", dict(given))

    def __getitem__(self, name: str) -> Any:
        return self._given[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what pickle and copy look for, too
            raise AttributeError(name)
        if name in self._given:
            return self._given[name]
        from torchrl_moe.modules.backends.vllm.sampling import default_of

        return default_of(name)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(
            f"sampling_params.{name} = {value!r} would change nothing: pass {name}= to a call, or generate_kwargs= to "
            "get_new_version"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._given,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._given!r})"


# Scores of given tokens: from the arguments of ``score`` to requests, and from completions to tensors.
#
# Letters: T tokens of a sequence.


LEAST = 1e-20
"""Temperature: a float32 logit that is divided by less is infinite."""
ONE_TOKEN = {"max_tokens": 1, "temperature": 0.0, "detokenize": False}
"""Sampling of the extra token, which is dropped: vLLM generates at least one token per prompt."""


def scorings(batch: PromptBatch, temperature: object, kept: object) -> list[Scoring]:
    count = len(batch.prompts)
    sequences = [prompt for prompt in batch.prompts if isinstance(prompt, np.ndarray)]
    if len(sequences) < count:
        raise ValueError("score takes token ids: text may be encoded to others than those that were sampled")
    values = _numbers(temperature)
    if values.ndim > 1:
        raise ValueError(f"temperature must be a number, or one per sequence, got shape {list(values.shape)}")
    temperatures = [float(values)] * count if values.ndim == 0 else values.tolist()
    if kept is None or batch.single:
        masks = [kept] * count
    elif isinstance(kept, list | tuple):
        masks = list(kept)
    else:
        raise ValueError(f"kept must be a list with KeptTokens or None for each sequence, got {shown(kept)}")
    for name, given in (("temperature", temperatures), ("kept", masks)):
        if len(given) != count:
            raise ValueError(f"{name} must have one entry per sequence: got {len(given)} for {count} sequences")
    return [
        Scoring(temperature=value, kept=_scored_ids(one, len(ids), i))
        for i, (ids, value, one) in enumerate(zip(sequences, temperatures, masks, strict=True))
    ]


def _numbers(temperature: object) -> NDArray[np.float64]:
    listed = temperature.tolist() if hasattr(temperature, "tolist") else temperature
    for one in listed if isinstance(listed, list | tuple) else [listed]:
        if not isinstance(one, list | tuple):  # of another rank: refused by its shape
            check_number("temperature", one, above=0, hint="At 0 every log-prob is 0.")
            check_number("temperature", one, LEAST, hint="Below, logits are infinite.")
    return np.asarray(listed, np.float64)


def _scored_ids(kept: object, tokens: int, position: int) -> KeptIds | None:
    if kept is None:
        return None
    if not isinstance(kept, KeptTokens) or kept.batch_dims:
        raise ValueError(f"kept[{position}] must be the KeptTokens of one sequence, or None, got {shown(kept)}")
    if len(kept.sizes) != tokens:
        raise ValueError(f"kept[{position}] is for {len(kept.sizes)} tokens, and there are {tokens}")
    ids, sizes = (np.asarray(part.cpu(), np.int32) for part in (kept.ids, kept.sizes))
    said = int(np.abs(sizes).sum())
    if said > len(ids):
        raise ValueError(f"kept[{position}] has {len(ids)} ids, and its sizes say {said}: cut both at the same token")
    return KeptIds(ids[:said], sizes)


def scores_of(completions: Sequence[Completion]) -> list[Tensor]:
    """Return the log-probs of each sequence, float32 ``[T]``."""
    found = []
    for completion in completions:
        if completion.prompt_logprobs is None:
            raise EngineError(f"request {completion.request_id!r} was aborted before its tokens had scores")
        found.append(torch.from_numpy(completion.prompt_logprobs.copy()))
    return found
