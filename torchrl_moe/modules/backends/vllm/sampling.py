"""Builds vLLM's ``SamplingParams`` from what users pass, in the engine process."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import numpy as np

from torchrl_moe.modules.backends.kept_ids import leaves_words_out

__all__ = ["SamplingParamsBuilder", "check_bad_words", "check_wire", "default_of"]


class SamplingParamsBuilder:
    """Builds one ``SamplingParams`` per distinct value, since a batch of requests shares them.

    Every result is final-only (the cumulative default loses completions for ``n`` > 1) and keeps log-probs in vLLM's
    flat container, which costs no object per token.

    Args:
        names_words: whether the engine reports which words sampling kept.
        logprobs_mode: the engine's, which says what its log-probs are of.
        reads_cache: whether requests may read cached prefixes.
    """

    def __init__(
        self, names_words: bool = True, logprobs_mode: str = "processed_logprobs", reads_cache: bool = True
    ) -> None:
        self._names_words = names_words
        self._mode = logprobs_mode
        self._reads_cache = reads_cache
        self._key: tuple[int, int] | None = None
        self._held: tuple[Any, Any] | None = None
        self._last: Any = None

    def __call__(self, spec: Any, guided_options: Any = None) -> Any:
        """Return the parameters of a mapping, of a ``SamplingParams``, or vLLM's defaults for ``None``.

        Raises:
            ValueError: an unknown or bad parameter, one that vLLM's engine core would not read or that asks for what no
                completion carries, log-probs over fewer words than all from an engine that does not report which, or of
                another distribution than is sampled from.
        """
        key = (id(spec), id(guided_options))
        if key != self._key:
            params = _build(spec, guided_options)
            check_wire("sampling_params", params)
            if not self._reads_cache:
                params.skip_reading_prefix_cache = True
            if params.logprobs is not None:
                self._refuse_other_distributions(params)
            # holding the sources keeps their ids from being used again
            self._key, self._held, self._last = key, (spec, guided_options), params
        return self._last

    def _refuse_other_distributions(self, params: Any) -> None:
        """Refuse log-probs of another distribution than is sampled from, or of one that cannot be known."""
        name = leaves_words_out(partial(getattr, params))
        if name is not None and not self._names_words:
            raise ValueError(
                f"{name}={getattr(params, name)!r} leaves words out, and this engine does not say which: it has logits "
                f"processors of your own, or another logprobs_mode than 'processed_logprobs'. Leave out {name}, or "
                "logprobs"
            )
        wrong = ""
        if not self._mode.endswith("logprobs"):
            wrong = f"logprobs={params.logprobs}, and this engine gives logits instead of log-probs"
        elif self._mode.startswith("raw") and params.temperature not in (0, 1):
            wrong = f"temperature={params.temperature:g}, and this engine's log-probs are of temperature 1"
        if wrong:
            raise ValueError(f"{wrong} (logprobs_mode={self._mode!r}): leave out logprobs_mode, or logprobs")


def check_wire(name: str, value: Any) -> None:
    """Read a struct as vLLM's engine core will, which ends at what it cannot read.

    Raises:
        ValueError: names the field, and what is allowed.
    """
    kind: Any = type(value)
    encoder, decoder = _wire_of(kind)
    try:
        decoder.decode(encoder.encode(value))
    except (TypeError, ValueError, OverflowError) as error:  # msgspec's own are such
        raise ValueError(f"{name}: {error}") from error


def check_bad_words(params: Any, tokenizer: Any) -> None:
    """Refuse more bad words than vLLM's model runner has room for, which ends at more.

    Raises:
        ValueError: too many words, or tokens of them.
    """
    from vllm import envs

    if not params.bad_words:
        return
    read = params.clone()
    read.update_from_tokenizer(tokenizer)
    words = read.bad_words_token_ids or []
    tokens = sum(map(len, words))
    if len(words) > envs.VLLM_MAX_NUM_BAD_WORDS or tokens > envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS:
        raise ValueError(
            f"sampling_params: bad_words are {len(words)} words of {tokens} tokens, with and without a space before; "
            f"the engine has room for {envs.VLLM_MAX_NUM_BAD_WORDS} of {envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS}"
        )


@cache
def _wire_of(kind: Any) -> tuple[Any, Any]:
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    return MsgpackEncoder(), MsgpackDecoder(kind)


def default_of(name: str) -> Any:
    """Return what a ``SamplingParams`` has at ``name`` where nothing was given.

    Raises:
        AttributeError: it has no such field, or vLLM is not installed.

    >>> default_of("top_p")
    1.0
    """
    try:
        from vllm import SamplingParams
    except ImportError as error:
        raise AttributeError(f"{name} was not given, and vLLM, which knows its default, is not installed") from error
    return getattr(SamplingParams(), name)


def _refuse_dropped(params: Any) -> None:
    """Refuse what vLLM would compute and a completion does not carry, and what it would leave out."""
    log_probs = "a completion has the log-probs of its sampled tokens only, logprobs=0"
    dropped = {
        "logprobs": log_probs,
        "prompt_logprobs": log_probs,
        "logprob_token_ids": log_probs,
        "prompt_logprob_token_ids": log_probs,
        "routed_experts_prompt_start": "a completion has the experts of all its tokens",
    }
    for name, instead in dropped.items():
        value = getattr(params, name)
        if value is None or (name in ("logprobs", "routed_experts_prompt_start") and value == 0):
            continue
        raise ValueError(f"SamplingParams({name}={value!r}): {instead}: leave it out")


def _build(spec: Any, guided_options: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, StructuredOutputsParams

    if not isinstance(spec, SamplingParams | Mapping | None):
        raise ValueError(f"sampling_params must be vllm.SamplingParams or a mapping, got {type(spec).__name__}")
    if isinstance(spec, SamplingParams):
        params = spec.clone()
    else:  # as sent by another process: objects in it are mappings, too
        fields = {
            name: value.item() if isinstance(value, np.generic) else value for name, value in (spec or {}).items()
        }
        of_objects = {"structured_outputs": StructuredOutputsParams, "repetition_detection": RepetitionDetectionParams}
        for name, kind in of_objects.items():
            if isinstance(fields.get(name), Mapping):
                try:
                    fields[name] = kind(**fields[name])
                except (TypeError, ValueError) as error:
                    raise ValueError(f"sampling_params: {name}: {error}") from error
        params = SamplingParams(**fields)
    _refuse_dropped(params)
    if guided_options is not None:
        if not isinstance(guided_options, StructuredOutputsParams | Mapping):
            kind = type(guided_options).__name__
            raise ValueError(f"guided_options must be vLLM's StructuredOutputsParams or a mapping, got {kind}")
        is_mapping = isinstance(guided_options, Mapping)
        params.structured_outputs = StructuredOutputsParams(**guided_options) if is_mapping else guided_options
    params.output_kind = RequestOutputKind.FINAL_ONLY
    params.flat_logprobs = params.logprobs is not None
    return params
