"""The words that sampling kept, as vLLM's Model Runner V2 reports them: here made small enough for any vocabulary.

With ``return_sampling_mask`` vLLM lists the kept ids of every token, and demands a ``top_k`` that bounds their number.
Here a token from which no word was left out has no list, one from which a few were left out lists these, and steps in
which no request leaves any out compute none. So ``top_p``, ``min_p``, bans and grammars need no ``top_k``.

Letters: N requests of a step, R their sampled tokens, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchrl_moe.modules.backends.kept_ids import leaves_words_out

__all__ = ["can_report", "lift_top_k_rule", "report_kept", "shortest"]


def can_report(engine_args: Any) -> bool:
    """Whether an engine of these arguments can report masks that are all a trainer needs to know.

    It cannot if the user has logits processors, which may change values, or if log-probs are not those of the sampled
    distribution.
    """
    return engine_args.logprobs_mode == "processed_logprobs" and not engine_args.logits_processors


def lift_top_k_rule(engine: Any) -> bool:
    """Let an ``AsyncLLM`` that reports masks take requests without a ``top_k``, and greedy ones; whether it reports.

    Its frontend refuses them; the engine core, another process with a configuration of its own, does not.
    """
    reports: bool = engine.model_config.return_sampling_mask
    engine.model_config.return_sampling_mask = False
    return reports


def report_kept(runner: Any) -> None:
    """Make a worker's model runner report masks as described above. Idempotent."""
    from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors

    class KeptMasks(SamplingMaskTensors):
        """A step's masks, on their way to the CPU and into lists."""

        def to_cpu_nonblocking(self) -> KeptMasks:
            return KeptMasks(*super().to_cpu_nonblocking())

        def tolists(self, num_sampled_tokens: NDArray[Any] | None = None) -> Any:
            lists = super().tolists(num_sampled_tokens)
            return lists._replace(
                **dict(zip(("token_ids", "offsets"), _shortened(lists, self.vocab_size), strict=True))
            )

    sampler = runner.sampler
    if "torchrl_moe_cuts" in vars(sampler):
        return
    sampler.torchrl_moe_cuts = cuts = np.zeros(runner.max_num_reqs, bool)  # by slot: whether its masks are wanted
    sampler.torchrl_moe_on = True  # false while the cost is measured
    add_request, sample = sampler.add_request, runner.sample

    def add_and_note(req_idx: int, params: Any) -> None:
        add_request(req_idx, params)
        cuts[req_idx] = params.logprobs is not None and leaves_words_out(partial(getattr, params)) is not None

    def sample_and_report(hidden_states: Any, batch: Any, grammar_output: Any) -> Any:
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


def _shortened(lists: Any, vocabulary: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the ids and offsets of a step's lists ``[R]``, each as :func:`shortest` has it."""
    counts = np.diff(lists.offsets)
    if 2 * counts.max(initial=0) <= vocabulary:
        return lists.token_ids, lists.offsets
    rows = [shortest(row, vocabulary) for row in np.split(lists.token_ids, lists.offsets[1:-1])]
    offsets = np.cumsum([0, *map(len, rows)])
    return np.concatenate(rows), offsets


def shortest(kept: NDArray[np.int32], vocabulary: int) -> NDArray[np.int32]:
    """Return the ids of kept words, or ``~id`` of the others where these are fewer; nothing where all were kept.

    >>> shortest(np.array([0, 1, 3], np.int32), 4), shortest(np.array([2], np.int32), 4)
    (array([-3], dtype=int32), array([2], dtype=int32))
    """
    if 2 * len(kept) <= vocabulary:
        return kept
    left_out = np.ones(vocabulary, bool)
    left_out[kept] = False
    return ~left_out.nonzero()[0].astype(np.int32)
