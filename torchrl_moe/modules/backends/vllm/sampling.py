"""Builds vLLM's ``SamplingParams`` from what users pass, in the engine process."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from torchrl_moe.modules.backends.replica import KeptIds, Scoring, leaves_ids_out

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast
    from vllm.config import ModelConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.outputs import SamplingMaskLists
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner


class SamplingParamsBuilder:
    """Builds one ``SamplingParams`` per distinct value, since a batch of requests shares them.

    Every result is final-only (the cumulative default loses completions for ``n`` > 1) and keeps log-probs in vLLM's
    flat container, which costs no object per token.
    """

    def __init__(
        self, reports_kept: bool = True, logprobs_mode: str = "processed_logprobs", reads_cache: bool = True
    ) -> None:
        self._reports_kept = reports_kept
        self._mode = logprobs_mode
        self._reads_cache = reads_cache
        self._last: tuple[object, object, SamplingParams] | None = None  # of which sources, and the parameters

    def __call__(self, spec: object, guided_options: object = None) -> SamplingParams:
        """Return the parameters of a mapping, of a ``SamplingParams``, or vLLM's defaults for ``None``."""
        if self._last is None or self._last[0] is not spec or self._last[1] is not guided_options:
            params = _build(spec, guided_options)
            check_wire("sampling_params", params)
            if not self._reads_cache:
                params.skip_reading_prefix_cache = True
            if params.logprobs is not None:
                self._refuse_other_distributions(params)
            self._last = spec, guided_options, params
        return self._last[2]

    def _refuse_other_distributions(self, params: SamplingParams) -> None:
        """Refuse log-probs of another distribution than is sampled from, or of one that cannot be known."""
        name = leaves_ids_out(partial(getattr, params))
        if name is not None and not self._reports_kept:
            raise ValueError(
                f"{name}={getattr(params, name)!r} leaves vocabulary entries out, and this engine does not say which: "
                "it has logits processors of your own, or another logprobs_mode than 'processed_logprobs'. Leave out "
                f"{name}, or logprobs"
            )
        wrong = ""
        if not self._mode.endswith("logprobs"):
            wrong = f"logprobs={params.logprobs}, and this engine gives logits instead of log-probs"
        elif self._mode.startswith("raw") and params.temperature not in (0, 1):
            wrong = f"temperature={params.temperature:g}, and this engine's log-probs are of temperature 1"
        if wrong:
            raise ValueError(f"{wrong} (logprobs_mode={self._mode!r}): leave out logprobs_mode, or logprobs")


def check_wire(name: str, value: object) -> None:
    """Read a struct as vLLM's engine core will, which ends at what it cannot read."""
    kind: Any = type(value)
    encoder, decoder = _wire_of(kind)
    try:
        decoder.decode(encoder.encode(value))
    except (TypeError, ValueError, OverflowError) as error:  # msgspec's own are such
        raise ValueError(f"{name}: {error}") from error


def check_bad_words(params: SamplingParams, tokenizer: PreTrainedTokenizerFast) -> None:
    """Refuse more bad words than vLLM's model runner has room for, which ends at more."""
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
def _wire_of(kind: Hashable) -> tuple[MsgpackEncoder, MsgpackDecoder]:
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    return MsgpackEncoder(), MsgpackDecoder(kind)


def default_of(name: str) -> Any:
    """Return what a ``SamplingParams`` has at ``name`` where nothing was given.

    >>> default_of("top_p")
    1.0
    """
    try:
        from vllm import SamplingParams
    except ImportError as error:
        raise AttributeError(f"{name} was not given, and vLLM, which knows its default, is not installed") from error
    return getattr(SamplingParams(), name)


def _build(spec: object, guided_options: object) -> SamplingParams:
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
    # whatever way it came: what vLLM would compute and a completion does not carry is refused
    for name in ("logprobs", "prompt_logprobs", "logprob_token_ids", "prompt_logprob_token_ids"):
        value = getattr(params, name)
        if value is not None and (name, value) != ("logprobs", 0):
            raise ValueError(
                f"SamplingParams({name}={value!r}): a completion has the log-probs of its sampled tokens only, "
                "logprobs=0: leave it out"
            )
    if guided_options is not None:
        if not isinstance(guided_options, StructuredOutputsParams | Mapping):
            got = type(guided_options).__name__
            raise ValueError(f"guided_options must be vLLM's StructuredOutputsParams or a mapping, got {got}")
        if isinstance(guided_options, Mapping):
            guided_options = StructuredOutputsParams(**guided_options)
        params.structured_outputs = guided_options
    # an answer that a weight update cuts follows all of its rows, so vLLM gives them all (see ``without_known_rows``)
    params.routed_experts_prompt_start = 0
    # a cumulative kind loses answers for n > 1
    params.output_kind = RequestOutputKind.FINAL_ONLY
    params.flat_logprobs = params.logprobs is not None
    return params


# -- the token ids that sampling kept, as vLLM's Model Runner V2 reports them, made small enough for any vocabulary ----
#
# With ``return_sampling_mask`` vLLM lists the kept ids of every token, and demands a ``top_k`` that bounds their
# number. Here a token from which no id was left out has no list, one from which a few were left out lists these,
# and steps in which no request leaves any out compute none. So ``top_p``, ``min_p``, bans and grammars need no
# ``top_k``. Letters: R sampled tokens of a step.


def can_report(engine_args: AsyncEngineArgs) -> bool:
    """Whether an engine's masks are all a trainer needs to know.

    They are not beside logits processors, which may change values, or log-probs of another distribution.
    """
    return engine_args.logprobs_mode == "processed_logprobs" and not engine_args.logits_processors


def lift_top_k_rule(engine: AsyncLLM) -> bool:
    """Let an ``AsyncLLM`` that reports masks take requests without a ``top_k``, and greedy ones; whether it reports.

    Only its frontend refuses them: the engine core is another process, with a configuration of its own.
    """
    reports: bool = engine.model_config.return_sampling_mask
    engine.model_config.return_sampling_mask = False
    return reports


def report_kept(runner: GPUModelRunner) -> None:
    """Make a worker's model runner report masks as described above. Idempotent."""
    from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors

    class KeptMasks(SamplingMaskTensors):
        """A step's masks, on their way to the CPU and into lists."""

        def to_cpu_nonblocking(self) -> KeptMasks:
            return KeptMasks(*super().to_cpu_nonblocking())

        def tolists(self, num_sampled_tokens: NDArray[np.generic] | None = None) -> SamplingMaskLists:
            lists = super().tolists(num_sampled_tokens)
            if 2 * np.diff(lists.offsets).max(initial=0) <= self.vocab_size:
                return lists
            rows = [shortest(row, self.vocab_size) for row in np.split(lists.token_ids, lists.offsets[1:-1])]
            return lists._replace(token_ids=np.concatenate(rows), offsets=np.cumsum([0, *map(len, rows)]))

    sampler = runner.sampler
    if "torchrl_moe_cuts" in vars(sampler):
        return
    sampler.torchrl_moe_cuts = cuts = np.zeros(runner.max_num_reqs, bool)  # by slot: whether its masks are wanted
    sampler.torchrl_moe_on = True  # false while the cost is measured
    add_request, sample = sampler.add_request, runner.sample

    def add_and_note(req_idx: int, params: SamplingParams) -> None:
        add_request(req_idx, params)
        cuts[req_idx] = params.logprobs is not None and leaves_ids_out(partial(getattr, params)) is not None

    def sample_and_report(hidden_states: Tensor, batch: InputBatch, grammar_output: object) -> tuple[Any, ...]:
        wanted = cuts[batch.idx_mapping_np] & sampler.torchrl_moe_on
        sampler.return_sampling_mask = bool(wanted.any())
        output, *rest = sample(hidden_states, batch, grammar_output)
        masks = output.sampling_mask_tensors
        if masks is not None:
            if not wanted.all():  # no list for the others
                unwanted = np.repeat(~wanted, masks.rows_per_request).nonzero()[0]
                masks.counts[unwanted.tolist()] = 0
            output.sampling_mask_tensors = KeptMasks(*masks)
        return output, *rest

    sampler.add_request, runner.sample = add_and_note, sample_and_report


def shortest(kept: NDArray[np.int32], vocabulary: int) -> NDArray[np.int32]:
    """Return the ids of kept tokens, or ``~id`` of the others where these are fewer; nothing where all were kept.

    >>> shortest(np.array([0, 1, 3], np.int32), 4), shortest(np.array([2], np.int32), 4)
    (array([-3], dtype=int32), array([2], dtype=int32))
    """
    if 2 * len(kept) <= vocabulary:
        return kept
    left_out = np.ones(vocabulary, bool)
    left_out[kept] = False
    return ~left_out.nonzero()[0].astype(np.int32)


# -- log-probs of a prompt's own tokens: what vLLM is asked for, and how its worker adjusts logits ---------------------
#
# vLLM scores any ids that a request names for each position (``prompt_logprob_token_ids``), normalised over the
# vocabulary at temperature 1, whatever it samples with. Here a request names its own next token. Temperature and kept
# ids travel in its ``SamplingParams``, as its rows do (``Forced``), and the worker divides and masks logits by
# them. (Naming all kept tokens instead would need no hook, but a rectangle of ids as wide as the longest list.)


KEY = "torchrl_moe_scoring"


def scoring_params(params: SamplingParams, scoring: Scoring, token_ids: NDArray[np.generic]) -> SamplingParams:
    """Return ``SamplingParams`` that ask for the log-probs of a prompt's tokens, and for no routes."""
    params = params.clone()
    params.routed_experts_prompt_start = len(token_ids)
    params.skip_reading_prefix_cache = True  # a token that is not computed has no log-prob
    if len(token_ids) > 1:
        params.prompt_logprob_token_ids = np.ascontiguousarray(token_ids[1:, None], np.int32)
    packed: dict[str, float | bytes] = {"temperature": scoring.temperature}
    if scoring.kept is not None:
        packed |= {"ids": scoring.kept.ids.tobytes(), "sizes": scoring.kept.sizes.tobytes()}
    if scoring.temperature != 1 or scoring.kept is not None:
        params.extra_args = {**(params.extra_args or {}), KEY: packed}
    return params


def adjust_scores(runner: GPUModelRunner) -> None:
    """Make a worker's model runner score each request by its own temperature and kept tokens. Idempotent.

    vLLM computes the logits of one request after another, but does not say whose they are. So each request that has
    something to adjust is handled in a call of its own.
    """
    worker = runner.prompt_logprobs_worker
    if "torchrl_moe_params" in vars(worker):
        return
    params: dict[str, SamplingParams] = {}
    worker.torchrl_moe_params = params
    add_request, remove_request = worker.add_request, worker.remove_request
    compute = worker.compute_prompt_token_id_logprobs

    def add_and_note(req_id: str, req_idx: int, sampling_params: SamplingParams) -> None:
        add_request(req_id, req_idx, sampling_params)
        if KEY in (sampling_params.extra_args or {}):
            params[req_id] = sampling_params

    def remove_and_forget(req_id: str) -> None:
        params.pop(req_id, None)
        remove_request(req_id)

    def compute_one_by_one(
        logits_fn: Callable[[Tensor], Tensor], hidden_states: Tensor, batch: InputBatch, prompt_lens: Tensor
    ) -> dict[str, object]:
        asked = worker.token_id_scores
        if not any(name in params for name in asked):  # nearly every step
            return compute(logits_fn, hidden_states, batch, prompt_lens)
        starts = dict(zip(batch.req_ids, batch.num_computed_prefill_tokens_np.tolist(), strict=False))
        adjusting = [name for name in asked if name in params and name in starts]  # in the same order on each rank
        worker.token_id_scores = {name: scores for name, scores in asked.items() if name not in adjusting}
        found = compute(logits_fn, hidden_states, batch, prompt_lens)
        unfinished = worker.token_id_scores
        for name in adjusting:
            at = starts[name]  # position of the next logits

            def of_request(hidden: Tensor, name: str = name) -> Tensor:
                nonlocal at
                at += len(hidden)
                return adjusted(logits_fn(hidden), params[name], at - len(hidden))

            worker.token_id_scores = {name: asked[name]}
            found |= compute(of_request, hidden_states, batch, prompt_lens)
            unfinished |= worker.token_id_scores
        worker.token_id_scores = unfinished
        return found

    worker.add_request, worker.remove_request = add_and_note, remove_and_forget
    worker.compute_prompt_token_id_logprobs = compute_one_by_one


def adjusted(logits: Tensor, params: SamplingParams, start: int) -> Tensor:
    """Return the logits ``[N, V]`` from which a prompt's tokens ``start + 1`` to ``start + N`` were drawn."""
    packed = (params.extra_args or {}).get(KEY)
    if packed is None:
        return logits
    from torchrl_moe.modules.backends.request_routes import drawn_from

    kept = None
    if "sizes" in packed:
        kept = KeptIds(np.frombuffer(packed["ids"], np.int32), np.frombuffer(packed["sizes"], np.int32))
    return drawn_from(logits, Scoring(temperature=packed["temperature"], kept=kept), start)


def prompt_logprobs(given: Tensor | NDArray[np.floating] | None, tokens: int) -> NDArray[np.float32] | None:
    """Return vLLM's log-probs of a prompt's tokens, float32 ``[P]``, NaN for the first; ``None`` if it was cut."""
    if given is None and tokens > 1:
        return None
    scores = np.full(tokens, np.nan, np.float32)
    scores[1:] = () if given is None else np.asarray(given, np.float32)[:, 0]
    return scores


def why_unscored(model_config: ModelConfig) -> str:
    """Return why an engine cannot score prompts as they were sampled, or ""."""
    mode = model_config.logprobs_mode
    return "" if mode.endswith("logprobs") else f"logprobs_mode={mode!r} gives logits"
