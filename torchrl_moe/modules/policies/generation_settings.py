"""Translates TorchRL's ``generate_kwargs`` to a transformers ``GenerationConfig``, and reads its sampling settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from torchrl_moe import _compat_generation

__all__ = ["GenerationSettings", "changes_of", "leaves_words_out", "temperature_of"]

BEAMS: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "length_penalty": (None, 1, 1.0),
    "early_stopping": (None, False),
    "diversity_penalty": (None, 0, 0.0),
    "force_words_ids": (None,),
}
"""Settings of beam search -> values that switch it off."""
KEEPS_ALL: Mapping[str, tuple[Any, ...]] = {
    "top_k": (None, 0),
    "top_p": (None, 1, 1.0),
    "min_p": (None, 0, 0.0),
    "top_h": (None,),
    "typical_p": (None, 1, 1.0),
    "epsilon_cutoff": (None, 0, 0.0),
    "eta_cutoff": (None, 0, 0.0),
}
"""Settings that exclude words from sampling -> values that switch them off."""
BANS: Mapping[str, tuple[Any, ...]] = {
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None, []),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
}
"""The same for settings that also apply to greedy answers."""
CHANGES: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (None, 1, 1.0),
    "encoder_repetition_penalty": (None, 1, 1.0),
    "sequence_bias": (None, {}, []),
    "guidance_scale": (None, 1, 1.0),
    "exponential_decay_length_penalty": (None,),
    "watermarking_config": (None,),
}
"""Settings that change logits -> values that switch them off."""
OURS = ("output_scores", "output_logits", "return_dict_in_generate", "tokenizer")
"""Names that TorchRL's wrapper sets in its own ``generate_kwargs``; they are ignored here."""
MODES = ("greedy_search", "sample")
LEAST_TEMPERATURE = 0.01
"""As in an engine, a lower temperature means this one, except for 0."""


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """How a wrapper generates.

    Attributes:
        named: the given settings, under TorchRL's common names.
        fields: of transformers' ``GenerationConfig``.
        samples: number of answers to a prompt.
        skip_special_tokens: whether text comes without them.
    """

    named: dict[str, Any]
    fields: dict[str, Any]
    samples: int
    skip_special_tokens: bool

    @classmethod
    def of(cls, generate_kwargs: Mapping[str, Any] | None) -> GenerationSettings:
        """Read ``generate_kwargs``: TorchRL's common names, its older ones, or fields of a ``GenerationConfig``.

        A temperature of 0 is greedy. Any sampling setting, such as a temperature, implies sampling; transformers itself
        would ignore it and stay greedy without ``do_sample=True``.

        Raises:
            ValueError: a value out of range, a setting of beam search, or a name that transformers does not know.

        >>> GenerationSettings.of({"max_tokens": 8, "temperature": 0.7, "n": 2}).fields
        {'temperature': 0.7, 'max_new_tokens': 8, 'do_sample': True}
        """
        named = _compat_generation.standard_names(dict(generate_kwargs or {}))
        fields = {name: value for name, value in named.items() if value is not None and name not in OURS}
        for name, off in BEAMS.items():
            if fields.get(name) not in off:
                raise ValueError(
                    f"generate_kwargs[{name!r}]={named[name]!r}: beam search draws from no distribution, so its "
                    "answers have neither log-probs nor routes; leave it out, or call model.generate()"
                )
            if name != "num_beams":  # which may have to override the model's own
                fields.pop(name, None)
        if fields.pop("logprobs", None) not in (None, False, True):
            raise ValueError(
                f"generate_kwargs['logprobs']={named['logprobs']!r}: log-probs are of the sampled tokens alone; leave "
                "it out, and pass return_log_probs"
            )
        samples, skip = fields.pop("num_return_sequences", 1), fields.pop("skip_special_tokens", False)
        if "stop_sequences" in fields:
            fields["stop_strings"] = fields.pop("stop_sequences")
        unknown = sorted(name for name in fields if not hasattr(GenerationConfig(), name))
        if unknown:
            raise ValueError(f"generate_kwargs has {unknown}, which transformers' GenerationConfig does not know")
        return cls(named, _greedy_or_not(fields), samples, bool(skip))

    def changed(self, generate_kwargs: Mapping[str, Any]) -> GenerationSettings:
        """Return the settings as the ``generate_kwargs`` of one call change them."""
        if not generate_kwargs:
            return self
        changes = _compat_generation.standard_names(dict(generate_kwargs))
        before = dict(self.named)
        if "do_sample" in changes or changes.get("temperature") is not None:
            # only one of the two decides whether to be greedy
            before = {name: value for name, value in before.items() if name not in ("do_sample", "temperature")}
        return type(self).of({**before, **changes})

    def config(self, model: Any) -> GenerationConfig:
        """Return the complete configuration: the given settings, then those of the model's own configuration.

        If neither sets ``top_k``, all words are sampled from; transformers would use 50.

        Raises:
            ValueError: together they request something other than sampling or greedy search.
        """
        config = GenerationConfig(**self.fields)
        own = getattr(model, "generation_config", None)
        if own is not None:
            config.update(**own.to_dict(), defaults_only=True, allow_custom_entries=True)
        if config.top_k is None and config.do_sample:  # for a greedy one transformers would warn
            config.top_k = 0
        mode = str(config.get_generation_mode().value)
        if mode not in MODES:
            raise ValueError(
                f"generate_kwargs, or the model's own generation_config, ask for {mode}: {' and '.join(MODES)} have "
                "log-probs and routes. Switch off the setting that causes it, for example with num_beams=1"
            )
        config.return_dict_in_generate = config.output_scores = config.output_logits = False
        return config


def _greedy_or_not(fields: dict[str, Any]) -> dict[str, Any]:
    """Set ``do_sample`` where other settings imply it."""
    temperature = fields.get("temperature")
    if temperature == 0:
        if fields.get("do_sample"):
            raise ValueError("do_sample=True samples, and temperature=0 is greedy: pass one of them")
        return {**{name: value for name, value in fields.items() if name != "temperature"}, "do_sample": False}
    if temperature is not None:
        fields = {**fields, "temperature": max(temperature, LEAST_TEMPERATURE)}
    asks = any(name in fields for name in ("temperature", *KEEPS_ALL))
    return {**fields, "do_sample": True} if asks and "do_sample" not in fields else fields


def temperature_of(config: GenerationConfig) -> float:
    """Return the sampling temperature of a configuration; 0 if it is greedy."""
    if not config.do_sample:
        return 0.0
    return 1.0 if config.temperature is None else float(config.temperature)


def leaves_words_out(config: GenerationConfig) -> bool:
    """Whether a configuration may exclude words from the distribution that a token is sampled from."""
    names = {**(KEEPS_ALL if config.do_sample else {}), **BANS}
    return any(getattr(config, name, None) not in values for name, values in names.items())


def changes_of(config: GenerationConfig) -> list[str]:
    """Return the settings that change the model's logits, with their values."""
    values = {name: getattr(config, name, None) for name in CHANGES}
    return [f"{name}={value!r}" for name, value in values.items() if value not in CHANGES[name]]
