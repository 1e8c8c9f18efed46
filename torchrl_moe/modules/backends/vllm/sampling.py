"""From what users pass to vLLM's ``SamplingParams``, in the engine process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["SamplingParamsBuilder"]


class SamplingParamsBuilder:
    """Builds one ``SamplingParams`` per distinct value, since a batch of requests shares them.

    Every result is final-only (the cumulative default loses completions for ``n`` > 1) and keeps log-probs in vLLM's
    flat container, which costs no object per token.
    """

    def __init__(self) -> None:
        self._key: tuple[int, int] | None = None
        self._held: tuple[Any, Any] | None = None
        self._last: Any = None

    def __call__(self, spec: Any, guided_options: Any = None) -> Any:
        """Return the parameters of a mapping, of a ``SamplingParams``, or vLLM's defaults for ``None``.

        Raises:
            ValueError: an unknown or bad parameter, or a per-request seed on CPU.
        """
        key = (id(spec), id(guided_options))
        if key != self._key:
            self._last = _build(spec, guided_options)
            # holding the sources keeps their ids from being used again
            self._key, self._held = key, (spec, guided_options)
        return self._last


def _build(spec: Any, guided_options: Any) -> Any:
    from vllm import SamplingParams
    from vllm.platforms import current_platform
    from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, StructuredOutputsParams

    if not isinstance(spec, SamplingParams | Mapping | None):
        raise ValueError(f"sampling_params must be vllm.SamplingParams or a mapping, got {type(spec).__name__}")
    if isinstance(spec, SamplingParams):
        params = spec.clone()
    else:  # as all come that another process sent: objects in it are mappings too
        fields = dict(spec or {})
        of_objects = {"structured_outputs": StructuredOutputsParams, "repetition_detection": RepetitionDetectionParams}
        for name, kind in of_objects.items():
            if isinstance(fields.get(name), Mapping):
                fields[name] = kind(**fields[name])
        params = SamplingParams(**fields)
    if params.seed is not None and current_platform.is_cpu():
        raise ValueError(
            f"SamplingParams(seed={params.seed}): a seed per request kills vLLM's CPU engine when a prompt is "
            "prefilled in chunks. Pass seed= to the engine instead."
        )
    if guided_options is not None:
        if not isinstance(guided_options, StructuredOutputsParams | Mapping):
            kind = type(guided_options).__name__
            raise ValueError(f"guided_options must be vLLM's StructuredOutputsParams or a mapping, got {kind}")
        is_mapping = isinstance(guided_options, Mapping)
        params.structured_outputs = StructuredOutputsParams(**guided_options) if is_mapping else guided_options
    params.output_kind = RequestOutputKind.FINAL_ONLY
    params.flat_logprobs = params.logprobs is not None
    return params
