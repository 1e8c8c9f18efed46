"""What TorchRL's code uses of an engine's wrapper besides ``forward``, under TorchRL's names: keys, tokenizer, device.

Also how a wrapper reads a batch, and writes answers or scores into it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.modules.llm.policies import LLMWrapperBase
from torchrl.modules.llm.policies import vLLMWrapper as TorchRLWrapper

from torchrl_moe.modules.policies.engine_scorer import EngineScorer
from torchrl_moe.modules.policies.full_sequences import FullSequence, pad_scored, read_sequences
from torchrl_moe.modules.policies.prompt_reading import Source, template_options
from torchrl_moe.modules.policies.rollout import RolloutKeys, stack_answers
from torchrl_moe.modules.policies.sampling_entry import SAMPLING

__all__ = ["EngineWrapper", "no_logits"]

PLAIN = (
    "input_mode",
    "generate",
    "prefer_tokens",
    "attention_mask_key",
    "chat_template",
    "chat_template_name",
    "pad_output",
    "layout",
    "timeout_seconds",
    "use_tqdm",
)
"""Arguments that become attributes unchanged."""
NAMES = ("history", "text", "tokens", "masks", "log_probs", "routed_experts")


def no_logits() -> NotImplementedError:
    """Return the error for methods that need logits, as TorchRL's ``get_dist`` and its variants do."""
    return NotImplementedError(
        "vLLM does not return logits, so there is no distribution: use a TransformersWrapper. generate=False gives the "
        "log-probs of tokens."
    )


class _CompletionClass:
    """The TensorClass that TorchRL makes of vLLM's ``CompletionOutput``, as an attribute of a class."""

    def __get__(self, wrapper: Any, kind: Any) -> Any:
        return TorchRLWrapper.CompletionOutput_tc


class EngineWrapper(LLMWrapperBase):
    """A wrapper whose model is an engine.

    Attributes:
        in_keys: keys that it reads.
        out_keys: TorchRL's keys, in TorchRL's order, of what it writes.
        extra_keys: further keys that it writes. return_history, return_text, return_tokens, return_masks,
            return_log_probs: which of these it writes.
    """

    CompletionOutput_tc = _CompletionClass()
    # TorchRL's base class reads them: calls of several threads are not joined
    _min_batch_size = _max_batch_size = None

    scorer: EngineScorer | None
    tokenizer: Any
    input_mode: Literal["history", "text", "tokens"]
    tokenizer_kwargs: dict[str, Any]
    attention_mask_key: NestedKey
    chat_template: str | None
    chat_template_name: str | None
    chat_template_kwargs: dict[str, Any]
    prefer_tokens: bool
    timeout_seconds: float | None
    use_tqdm: bool
    return_log_probs: bool
    return_routed_experts: bool
    history_key: str
    routed_experts_key: str
    keys: RolloutKeys
    _device: torch.device | None

    def _set_plain(self, arguments: Mapping[str, Any]) -> None:
        """Set the attributes that are given by arguments."""
        for name in PLAIN:
            setattr(self, name, arguments[name])
        self.tokenizer_kwargs = dict(arguments["tokenizer_kwargs"] or {})
        self.chat_template_kwargs = template_options(arguments["chat_template_kwargs"])
        self.return_log_probs = arguments["return_log_probs"] is not False
        self._device = None if arguments["device"] is None else torch.device(arguments["device"])

    @property
    def device(self) -> torch.device | None:
        """Where the output goes; ``None`` leaves it on the CPU."""
        return self._device

    @property
    def padding_value(self) -> int | None:
        """The padding token; the end-of-turn token if there is no separate one."""
        pad: int | None = getattr(self.tokenizer, "pad_token_id", None)
        return getattr(self.tokenizer, "eos_token_id", None) if pad is None else pad

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Use another tokenizer from now on."""
        self.tokenizer = tokenizer

    def _set_keys(self, arguments: Mapping[str, Any]) -> None:
        """Set all keys, and which entries are read and written."""
        for name in NAMES:
            setattr(self, f"{name}_key", arguments[f"{name}_key"])
        self.return_history, self.return_text = self.input_mode == "history", self.input_mode != "tokens"
        self.return_tokens = self.return_masks = True
        self.keys = RolloutKeys(
            tokens=self.tokens_key,
            masks=self.masks_key,
            log_probs=self.log_probs_key if self.return_log_probs else None,
            routed_experts=self.routed_experts_key if self.return_routed_experts else None,
        )
        leaf = "full" if self.scorer is not None else "prompt"
        self.input_key = arguments["input_key"] or (self.input_mode, leaf)
        self.in_keys = [self.input_key, *([] if self.scorer is None else self.scorer.in_keys)]
        self.out_keys = [self.text_key] if self.return_text else []
        self.out_keys += [self.masks_key, self.tokens_key]
        self.out_keys += [self.log_probs_key] if self.return_log_probs else []
        self.out_keys += [self.history_key] if self.return_history else []
        self.extra_keys = [] if self.scorer is not None else self._extra_keys()

    def _extra_keys(self) -> list[NestedKey]:
        keys: list[NestedKey] = [] if self.keys.routed_experts is None else [self.keys.routed_experts]
        return [
            *keys,
            "policy_versions",
            "policy_version",
            "num_segments",
            "resume",
            "finish_reason",
            "num_cached_tokens",
            SAMPLING,
        ]

    @property
    def _source(self) -> Source:
        return Source(
            input_mode=self.input_mode,
            input_key=self.input_key,
            tokenizer=self.tokenizer,
            tokenizer_kwargs=self.tokenizer_kwargs,
            attention_mask_key=self.attention_mask_key,
            chat_template=self.chat_template,
            chat_template_name=self.chat_template_name,
            prefer_tokens=self.prefer_tokens,
            tokens_key=self.tokens_key,
            masks_key=self.masks_key,
            pad=self.padding_value,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    # -- scores -----------------------------------------------------------------------------------------------------

    def _score(
        self, scorer: EngineScorer, samples: Sequence[TensorDictBase], source: TensorDictBase, target: Any
    ) -> TensorDictBase:
        """Score the samples of ``source``, and write the results."""
        sequences = read_sequences(samples, self._source)
        names = {name: getattr(self, f"{name}_key") for name in NAMES}
        answers = scorer.answers(samples, sequences, names)
        shape = source.batch_size
        if self.pad_output:
            padded = pad_scored(answers, self.padding_value or 0, names)
            out: TensorDictBase = padded.reshape(shape) if shape else padded[0]
        else:
            out = stack_answers(answers, shape)
        stays = self._stays(sequences) and target is None and self.inplace is True
        if stays:  # other entries of the rollout have the layout of these tokens
            out = out.exclude(self.tokens_key, *([self.masks_key] if _have(samples, self.masks_key) else []))
        return self._write(source, target, out, [self.log_probs_key] if stays else self.out_keys)

    def _stays(self, sequences: Sequence[FullSequence]) -> bool:
        """Whether the tokens that were read are those that would be written."""
        if self.input_mode != "tokens" or self.input_key != (self.tokens_key, "full"):
            return False
        return not self.pad_output or len({len(one.ids) for one in sequences}) == 1

    # -- output -----------------------------------------------------------------------------------------------------

    def _write(
        self,
        source: TensorDictBase,
        target: TensorDictBase | None,
        out: TensorDictBase,
        stale: Sequence[NestedKey] | None = None,
    ) -> TensorDictBase:
        """Put the output where it belongs.

        Args:
            source: the input.
            target: the caller's own TensorDict for the output.
            out: what is written.
            stale: old entries to remove; default: all that the wrapper writes.
        """
        out = out if self._device is None else out.to(self._device)
        if target is None:
            if self.inplace is False:
                return out
            target = source.empty() if self.inplace == "empty" else source
        stale = [*self.out_keys, *self.extra_keys] if stale is None else stale
        return target.exclude(*stale, inplace=True).update(out)


def _have(samples: Sequence[TensorDictBase], masks_key: str) -> bool:
    """Whether all samples have a mask of non-padding tokens."""
    return all(sample.get((masks_key, "all_attention_mask"), None) is not None for sample in samples)
