"""Reads what users pass as vLLM's ``SamplingParams``; what this engine does not serve is refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchrl_moe.modules.backends.sampling_fields import check_fields

__all__ = ["Sampling", "read_sampling"]

LEAST_TEMPERATURE = 1e-2  # vLLM's: it samples at this one where a lower one is asked for, except for 0

REFUSED: Mapping[str, tuple[Any, ...]] = {
    "prompt_logprobs": (None,),
    "prompt_logprob_token_ids": (None,),
    "prompt_logprob_start": (None,),
    "logprob_token_ids": (None, []),
    "structured_outputs": (None,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "extra_args": (None, {}),
    "thinking_token_budget": (None,),
    "repetition_detection": (None,),
    "routed_experts_prompt_start": (None, 0),
    "trace_decode_token_ids": (None, []),
}
"""Fields of vLLM that this engine does not serve -> values that ask for nothing."""
WITHOUT_EFFECT = {
    "flat_logprobs",
    "output_kind",
    "output_text_buffer_length",
    "skip_clone",
    "skip_reading_prefix_cache",
    "spaces_between_special_tokens",
    "stream_interval",
    "watermarking",
}
"""Fields about how vLLM delivers answers, or about features that this engine does not have; ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How an answer is sampled: the fields of vLLM's ``SamplingParams``, with its names, defaults and limits.

    ``logprobs`` says whether log-probs are wanted, ``stop`` and ``stop_token_ids`` are tuples.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = field(default=None, compare=False)  # answers that differ in nothing else are drawn together
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest word is taken."""
        return self.temperature == 0.0

    @property
    def leaves_words_out(self) -> bool:
        """Whether a token may be drawn from fewer than all words."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or self.min_tokens > 0

    def __post_init__(self) -> None:
        if self.stop and not self.detokenize:
            raise ValueError("sampling_params: stop strings need detokenize=True")
        if self.is_greedy and self.n > 1:
            raise ValueError(f"sampling_params: n={self.n} with temperature=0 would give one answer several times")


KNOWN = {field.name for field in dataclasses.fields(Sampling)}


def read_sampling(spec: Any, guided_options: Any = None) -> Sampling:
    """Return the sampling that a mapping of ``SamplingParams`` fields asks for; ``None`` is vLLM's default.

    Raises:
        ValueError: a value out of range, a field that this engine does not serve, or an unknown one.
    """
    if not isinstance(spec, Mapping | None):
        raise ValueError(f"sampling_params must be a mapping, got {type(spec).__name__}")
    if guided_options is not None:
        raise ValueError("guided_options_request: engine='transformers' has no structured outputs; vLLM has")
    check_fields(spec)
    given = {name: value for name, value in (spec or {}).items() if name not in WITHOUT_EFFECT}
    for name, neutral in REFUSED.items():
        if (value := given.pop(name, None)) not in neutral:
            raise ValueError(f"sampling_params: engine='transformers' does not serve {name}={value!r}; vLLM does")
    if unknown := sorted(given.keys() - KNOWN):
        raise ValueError(f"sampling_params: unknown {', '.join(unknown)}; known: {', '.join(sorted(KNOWN))}")
    if given.get("logprobs") not in (None, 0):
        raise ValueError(
            f"sampling_params: logprobs={given['logprobs']!r}: a completion has the log-probs of its sampled tokens "
            "only, logprobs=0"
        )
    if "logprobs" in given:
        given["logprobs"] = given["logprobs"] is not None
    stop, stop_ids = given.get("stop"), given.get("stop_token_ids")
    given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop or ())
    given["stop_token_ids"] = tuple(stop_ids or ())
    given["seed"] = None if given.get("seed") == -1 else given.get("seed")
    return Sampling(**_as_vllm_reads(given))


def _as_vllm_reads(given: dict[str, Any]) -> dict[str, Any]:
    """Map values that mean the same to one, as vLLM does."""
    temperature = given.get("temperature", 1.0)
    if temperature == 0:
        return {**given, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    if 0 < temperature < LEAST_TEMPERATURE:
        given["temperature"] = LEAST_TEMPERATURE
    if given.get("top_k") == -1:
        given["top_k"] = 0
    return given
