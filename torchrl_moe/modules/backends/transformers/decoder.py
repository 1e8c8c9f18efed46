"""A model of transformers as an engine serves it: loaded, tested, and decoding answers of any lengths in one batch.

Answers join and leave between two steps, and each step gives each a token. The batch is padded on the left, so that the
newest token of every answer is in the last column; keys and values are those of transformers' own ``DynamicCache``, and
whatever is padded is masked. Nothing here is fast.

Letters: R answers of the batch, J that join, S columns, V vocabulary, L decoder layers, K experts per token.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import DynamicLayer

from torchrl_moe._compat_transformers import cache_argument, check_whole, one_shape_of_experts
from torchrl_moe.data import RoutingLayout
from torchrl_moe.errors import UnsupportedRouterError
from torchrl_moe.modules.backends.replica import (
    NOTHING,
    Completion,
    CompletionMetrics,
    CompletionOutput,
    ReplicaInfo,
    Request,
    Scoring,
    name_kept,
    nothing_yet,
)
from torchrl_moe.modules.backends.request_routes import RequestRoutes, check_rows, drawn_from, rows_of_answer
from torchrl_moe.modules.backends.transformers.answer import (
    Answer,
    Draw,
    LockedTokenizer,
    Rows,
    Sampling,
    filled,
    read_sampling,
)
from torchrl_moe.modules.backends.transformers.transformers_arguments import EngineArguments
from torchrl_moe.modules.replay.binding import UNSET, Recording
from torchrl_moe.modules.replay.discovery import has_experts
from torchrl_moe.modules.replay.float32 import float32_routers
from torchrl_moe.modules.replay.router_replay import RouterReplay

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SCORED_TOKENS = 256  # whose logits exist at a time
CHECKED = (4, 6)  # tokens of the sequences that the model is tested with
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}  # of the logits' standard deviation
COARSE = 0.1  # the same for other dtypes
NO_ROUTES = "the engine captures no routes"
MAX_MODEL_LEN = 8192  # of a model that names no limit


# -- tokens are drawn from logits, each row as its answer asks ---------------------------------------------------------
# The processors are transformers', their order is vLLM's.


class Sampler:
    """Draws the next token of each answer of a batch."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)

    def seed(self, seed: int) -> None:
        self._generator.manual_seed(seed)

    def __call__(self, logits: Tensor, answers: Sequence[Answer]) -> list[Draw]:
        """Return the next token of each answer; those with equal parameters are drawn together."""
        by_sampling: dict[Sampling, list[int]] = {}
        for row, answer in enumerate(answers):
            by_sampling.setdefault(answer.sampling, []).append(row)
        draws: dict[int, Draw] = {}
        for sampling, rows in by_sampling.items():
            drawn = self._draw(logits[rows].float(), sampling, [answers[row] for row in rows])
            draws.update(zip(rows, drawn, strict=True))
        return [draws[row] for row in range(len(answers))]

    def _draw(self, logits: Tensor, sampling: Sampling, answers: Sequence[Answer]) -> list[Draw]:
        logits = _processed(logits, sampling, answers)
        log_probs = logits.log_softmax(-1)
        if sampling.is_greedy:
            tokens = logits.argmax(-1)
        else:  # an exponential race: each id's time is drawn at the rate of its probability, and the earliest wins
            tokens = (log_probs.exp() / self._noise(log_probs, answers)).argmax(-1)
        chosen = log_probs.gather(-1, tokens[:, None])[:, 0].tolist()
        reports = sampling.logprobs and sampling.leaves_ids_out
        masks = name_kept(log_probs) if reports else [NOTHING] * len(answers)
        return [Draw(*one) for one in zip(tokens.tolist(), chosen, masks, strict=True)]

    def _noise(self, like: Tensor, answers: Sequence[Answer]) -> Tensor:
        noise = torch.empty_like(like)
        own = [row for row, answer in enumerate(answers) if answer.generator is not None]
        if len(own) < len(answers):
            noise.exponential_(generator=self._generator)
        for row in own:
            noise[row].exponential_(generator=answers[row].generator)
        return noise


def _processed(logits: Tensor, sampling: Sampling, answers: Sequence[Answer]) -> Tensor:
    """Return the logits ``[R, V]`` of what is drawn from, -inf for ids that are left out."""
    for row, answer in enumerate(answers):
        if sampling.repetition_penalty != 1:
            ids = torch.tensor([answer.ids], device=logits.device)
            penalise = RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty))
            logits[row] = penalise(ids, logits[row : row + 1])[0]
        if answer.tokens and (sampling.frequency_penalty or sampling.presence_penalty):
            ids, counts = torch.tensor(answer.tokens, device=logits.device).unique(return_counts=True)
            logits[row, ids] -= sampling.frequency_penalty * counts + sampling.presence_penalty
        if masked := [token for token in answer.masked if token < logits.shape[1]]:
            logits[row, masked] = float("-inf")
    for warp in _warpers(sampling):
        logits = warp(None, logits)
    return logits


@lru_cache(maxsize=256)
def _warpers(sampling: Sampling) -> tuple[Callable[[None, Tensor], Tensor], ...]:
    """Return the temperature, then what leaves ids out, in vLLM's order; a greedy answer has neither."""
    if sampling.is_greedy:
        return ()
    wanted: tuple[tuple[bool, Callable[[], Callable[[None, Tensor], Tensor]]], ...] = (
        (sampling.temperature != 1, lambda: TemperatureLogitsWarper(float(sampling.temperature))),
        (sampling.min_p > 0, lambda: MinPLogitsWarper(float(sampling.min_p))),
        (sampling.top_k > 0, lambda: TopKLogitsWarper(int(sampling.top_k))),
        (sampling.top_p < 1, lambda: TopPLogitsWarper(float(sampling.top_p))),
    )
    return tuple(make() for is_wanted, make in wanted if is_wanted)


# -- the batch ---------------------------------------------------------------------------------------------------------


class BatchDecoder:
    """Decodes with one model, which no other thread may use at the same time."""

    def __init__(
        self, model: PreTrainedModel, replay: RouterReplay | None, sampler: Sampler, width: int | None = None
    ) -> None:
        self._width = width  # of the row in which each answer is read in whole for each token; None: keys are kept
        self.model, self.replay, self.sampler = model, replay, sampler
        self.answers: list[Answer] = []
        self._takes = set(inspect.signature(model.forward).parameters)
        self._cache_argument = cache_argument(self._takes)
        self._cache: DynamicCache | None = None
        self._mask = torch.empty(0)  # bool [R, S]
        try:
            self.token_bytes = self._check()
        except (AttributeError, LookupError, RuntimeError, TypeError) as error:  # it may need another kind of cache
            raise ValueError(
                f"engine='transformers' cannot serve {type(model).__name__}: its forward pass with a DynamicCache "
                f"failed, {type(error).__name__}: {error}; try vLLM"
            ) from error

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def columns(self) -> int:
        """S: as many as the longest answer has tokens, or a few more."""
        if self._width is not None:
            return self._width
        return self._mask.shape[1] if self.answers else 0

    # -- the batch --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, joining: Sequence[Answer], version: int) -> None:
        """Read what joins, and give each answer a token."""
        if self._width is not None:
            for answer in joining:
                answer.note_read()
            self.answers = [*self.answers, *joining]
            logits = torch.stack([self._whole(answer, self._width) for answer in self.answers])
        else:
            # those of the batch read their last token; those that join read all of theirs
            parts = [self._advance()] if self.answers else []
            if joining:
                parts.append(self._read(joining))
                self.answers += joining
            logits = torch.cat(parts)
        for answer, draw in zip(self.answers, self.sampler(logits, self.answers), strict=True):
            answer.add(draw, version)

    def leave(self, gone: Sequence[Answer]) -> None:
        """Drop answers, and the columns that only they had."""
        stays = [row for row, answer in enumerate(self.answers) if answer not in gone]
        if len(stays) == len(self.answers):
            return
        self.answers = [self.answers[row] for row in stays]
        if not stays or self._width is not None:
            self._cache = None
            return
        self._mask = self._mask[stays]
        # columns on the left that only those had
        empty = int((~self._mask.any(0)).long().cumprod(0).sum())
        self._mask = self._mask[:, empty:]
        assert self._cache is not None
        for layer in self._cache.layers:
            layer.keys, layer.values = layer.keys[stays, :, empty:], layer.values[stays, :, empty:]

    def empty(self) -> list[Answer]:
        """Drop all answers with their keys and values, and return them: they may join again, and are then read again.

        One that has just got a token that was not read yet has a row for each other one.
        """
        gone = self.answers
        self.answers, self._cache = [], None
        return gone

    def _advance(self) -> Tensor:
        """Read the newest token of each answer; return logits ``[R, V]``."""
        ids = torch.tensor([[answer.tokens[-1]] for answer in self.answers], device=self.device)
        self._mask = nn.functional.pad(self._mask, (0, 1), value=True)
        logits, rows = self._forward(ids, self._mask, self._cache)
        if rows is not None:
            for answer, row in zip(self.answers, rows, strict=True):
                answer.add_rows(row)
        return logits[:, -1]

    def _read(self, joining: Sequence[Answer]) -> Tensor:
        """Read all tokens of answers, equal ones once; return logits ``[J, V]``."""
        followed = [answer.rows_to_follow() for answer in joining]
        places: dict[tuple[int | bytes | None, ...], int] = {}
        unique: list[tuple[list[int], Rows | None]] = []
        index = []
        for answer, rows in zip(joining, followed, strict=True):
            key = (*answer.ids, None if rows is None else rows.tobytes())
            if key not in places:
                places[key] = len(unique)
                unique.append((answer.ids, rows))
            index.append(places[key])
        ids, mask = _padded([ids for ids, _ in unique], self.device)
        cache = DynamicCache()
        logits, routes = self._forward(ids, mask, cache, self._laid_out([rows for _, rows in unique], ids))
        cache.batch_select_indices(torch.tensor(index, device=self.device))
        self._merge(cache, mask[index])
        for answer, place in zip(joining, index, strict=True):
            answer.note_read()
            if routes is not None:
                answer.add_rows(routes[place, ids.shape[1] - len(answer.ids) :])
        return logits[index, -1]

    def _whole(self, answer: Answer, width: int) -> Tensor:
        """Read an answer by itself, in a row of fixed width; return the logits ``[V]`` after its last token."""
        ids = answer.ids
        row = torch.zeros(1, width, dtype=torch.long, device=self.device)
        row[0, : len(ids)] = torch.tensor(ids)
        inputs = {"input_ids": row, "position_ids": torch.arange(width, device=self.device)[None]}
        # rows that it was read with before are followed: they are the ones that it has
        followed = self._laid_out([answer.rows_to_follow()], row[:, : len(ids)])
        if followed is not None:
            followed = nn.functional.pad(followed, (0, 0, 0, 0, 0, width - len(ids)), value=UNSET)
        with self._routing(followed, torch.ones_like(row)) as recording:
            logits: Tensor = self.model(**inputs, use_cache=False).logits
        if recording is not None:
            answer.add_rows(recording.routed_experts[0, : len(ids)].cpu().numpy())
        return logits[0, len(ids) - 1]

    def _laid_out(self, rows: Sequence[Rows | None], ids: Tensor) -> Tensor | None:
        """Return rows to follow as the batch is laid out, ``[J, S, L, K]``; ``None`` if there are none."""
        if self.replay is None or all(one is None for one in rows):
            return None
        routes = torch.full((*ids.shape, self.replay.num_layers, self.replay.top_k), UNSET, dtype=torch.int16)
        for row, one in enumerate(rows):
            if one is not None:
                routes[row, ids.shape[1] - len(one) :] = torch.from_numpy(one.astype(np.int16))
        return routes

    def _merge(self, cache: DynamicCache, mask: Tensor) -> None:
        """Add rows below those of the batch; the narrower ones are padded on the left."""
        if self._cache is None:
            self._cache, self._mask = cache, mask
            return
        width = max(self._mask.shape[1], mask.shape[1])
        self._mask = torch.cat([_widened(self._mask, width), _widened(mask, width)])
        for ours, theirs in zip(self._cache.layers, cache.layers, strict=True):
            ours.keys = torch.cat([_wider(ours.keys, width), _wider(theirs.keys, width)])
            ours.values = torch.cat([_wider(ours.values, width), _wider(theirs.values, width)])

    # -- the model --------------------------------------------------------------------------------------------------

    def _forward(
        self, ids: Tensor, mask: Tensor, cache: DynamicCache, followed: Tensor | None = None, keep: int = 1
    ) -> tuple[Tensor, Rows | None]:
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        wanted = {"position_ids": positions, "logits_to_keep": keep}
        given = {name: value for name, value in wanted.items() if name in self._takes}
        with self._routing(followed, mask[:, -ids.shape[1] :]) as recording:
            out = self.model(
                input_ids=ids,
                attention_mask=mask.long(),
                use_cache=True,
                **{self._cache_argument: cache},
                **given,
            )
        return out.logits[:, -keep:], None if recording is None else recording.routed_experts.cpu().numpy()

    @contextmanager
    def _routing(self, followed: Tensor | None, mask: Tensor) -> Iterator[Recording | None]:
        if self.replay is None:
            yield None
        elif followed is None:
            with self.replay.record() as recording:
                yield recording
        else:
            with self.replay.replay(followed, attention_mask=mask, record=True) as used:
                yield used

    @torch.no_grad()
    def score(self, ids: Sequence[int], scoring: Scoring, followed: Rows | None = None) -> NDArray[np.float32]:
        """Return the log-probs of a sequence's tokens, float32 ``[T]``, NaN for the first."""
        tokens = torch.tensor([list(ids)], device=self.device)
        routes = self._laid_out([None if followed is None else filled(followed, len(ids))], tokens)
        scores = np.full(len(ids), np.nan, np.float32)
        cache, mask = DynamicCache(), torch.ones_like(tokens, dtype=torch.bool)
        for start in range(0, len(ids) - 1, SCORED_TOKENS):
            stop = min(start + SCORED_TOKENS, len(ids) - 1)
            part = None if routes is None else routes[:, start:stop]
            logits, _ = self._forward(tokens[:, start:stop], mask[:, :stop], cache, part, stop - start)
            log_probs = drawn_from(logits[0], scoring, start).log_softmax(-1)
            chosen = log_probs.gather(-1, tokens[0, start + 1 : stop + 1, None])[:, 0]
            scores[start + 1 : stop + 1] = chosen.cpu().numpy()
        return scores

    # -- whether it can be done -------------------------------------------------------------------------------------

    @torch.no_grad()
    def _check(self) -> int:
        """Compare a padded batch, read in two parts, with each sequence by itself; return the bytes of a token."""
        kind = type(self.model).__name__
        # each sequence by itself; then both in one padded batch, the last token in a second part
        alone = [torch.arange(1, count + 1, device=self.device)[None] for count in CHECKED]
        found = [self._forward(ids, torch.ones_like(ids).bool(), DynamicCache()) for ids in alone]
        ids, mask = _padded([one[0, :-1].tolist() for one in alone], self.device)
        routes = [None if rows is None else rows[0] for _, rows in found]
        cache = DynamicCache()
        self._forward(ids, mask, cache, self._laid_out([None if one is None else one[:-1] for one in routes], ids))
        if any(type(layer) is not DynamicLayer for layer in cache.layers):
            raise ValueError(f"engine='transformers' cannot serve {kind}: it keeps more than keys and values; try vLLM")
        last = torch.cat([one[:, -1:] for one in alone])
        mask = nn.functional.pad(mask, (0, 1), value=True)
        logits, _ = self._forward(
            last, mask, cache, self._laid_out([None if one is None else one[-1:] for one in routes], last)
        )
        wanted = torch.cat([logits for logits, _ in found])
        worst = (logits - wanted).abs().max().item() / max(wanted.float().std().item(), 1e-6)
        if not worst <= TOLERANCE.get(wanted.dtype, COARSE):
            raise ValueError(
                f"engine='transformers' cannot serve {kind}: in a padded batch its logits are off by {worst:.1e} of "
                "their standard deviation; try vLLM"
            )
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        return int(held // (len(CHECKED) * max(CHECKED)))


def _padded(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ids ``[J, S]``, padded on the left with their own first tokens, and the mask of what is not a pad."""
    width = max(map(len, sequences))
    ids = torch.tensor([[one[0]] * (width - len(one)) + list(one) for one in sequences])
    mask = torch.tensor([[False] * (width - len(one)) + [True] * len(one) for one in sequences])
    return ids.to(device), mask.to(device)


def _widened(mask: Tensor, width: int) -> Tensor:
    return nn.functional.pad(mask, (width - mask.shape[1], 0), value=False)


def _wider(states: Tensor, width: int) -> Tensor:
    return nn.functional.pad(states, (0, 0, width - states.shape[2], 0))


# -- requests that run -------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Running:
    request: Request
    prompt_ids: list[int]
    started: float = field(default_factory=time.monotonic)
    answers: list[Answer] = field(default_factory=list)
    done: dict[int, CompletionOutput] = field(default_factory=dict)
    kept: int = 0
    joined_at: float = 0.0
    token_at: float = 0.0
    scores: NDArray[np.float32] | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to compute."""
        if self.request.scoring is not None:
            return self.scores is not None
        return all(answer.finish_reason is not None for answer in self.answers)

    def completion(self) -> Completion:
        """Return its completion so far; answers that still grow count as cut."""
        request, began, given = self.request, self.started, self.request.resume
        before = 0.0 if given is None else given.metrics.total_seconds
        return Completion(
            request_id=request.request_id,
            prompt=request.prompt if given is None else given.prompt,
            prompt_token_ids=np.array(self.prompt_ids, np.int64),
            num_cached_tokens=0,
            outputs=self._outputs(),
            metrics=CompletionMetrics(
                queue_seconds=max(self.joined_at - began, 0.0),
                first_token_seconds=max(self.token_at - began, 0.0),
                total_seconds=before + time.monotonic() - began,
            ),
            prompt_logprobs=self.scores,
        )

    def _outputs(self) -> list[CompletionOutput]:
        if self.request.scoring is None:
            grown = {one.index: one.output(self.request.return_routed_experts) for one in self.answers}
            return [output for _, output in sorted({**self.done, **grown}.items())]
        outputs = nothing_yet(self.request).outputs  # a scoring request has no answer
        if self.scores is not None:
            outputs[0].finish_reason = "length"
        return outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model that can serve, and reads what it is asked for."""

    arguments: EngineArguments
    decoder: BatchDecoder
    tokenizer: LockedTokenizer
    info: ReplicaInfo
    routes: RequestRoutes
    vocabulary: int
    report: Mapping[str, Iterable[str]]
    """Of transformers' loader, what the checkpoint lacked."""

    def read(self, request: Request) -> Running:
        """Return what runs for a request, or refuse it."""
        if request.lora_request is not None:
            raise ValueError("lora_request: engine='transformers' serves no adapters; vLLM does")
        request = self.routes.checked(request)
        sampling = read_sampling(request.sampling_params, request.guided_options)
        given = request.prompt_token_ids
        ids = self.tokenizer.encode(request.prompt or "") if given is None else given.tolist()
        most = self.info.max_model_len - (request.scoring is None)
        if not 1 <= len(ids) <= most:
            raise ValueError(f"a prompt must have 1 to {most} tokens, got {len(ids)}: max_model_len is the limit")
        self._check_ids("a prompt", ids)
        running = Running(request, ids)
        if request.scoring is None:
            for index in range(sampling.n):
                self._add(running, sampling, index)
        return running

    def _add(self, running: Running, sampling: Sampling, index: int) -> None:
        """Add an answer: as it is if it was finished before, else to generate, or to continue."""
        request = running.request
        before = None if request.resume is None else request.resume.outputs[index]
        if before is not None and before.finish_reason != "abort":
            running.done[index] = before
            return
        layout, longest = self.info.layout, self.info.max_model_len
        answer = Answer(running.prompt_ids, sampling, index, self.tokenizer, longest, layout)
        answer.followed, answer.how = request.routed_experts, self.routes.how(request)
        if before is not None and len(before.token_ids):
            # what cannot be read again is refused here: in the batch it would end the engine, and all other requests
            self._check_ids(f"answer {before.index} to resume", before.token_ids.tolist())
            if answer.how == "forced" and layout is not None and before.routed_experts is not None:
                rows = rows_of_answer(before.routed_experts, layout)
                check_rows(rows, len(answer.prompt_ids) + len(before.token_ids), layout)
            answer.go_on_from(before)
            running.kept += len(before.token_ids)
        if sampling.seed is not None:  # without repeating random numbers of the first part
            seed = sampling.seed + index + len(answer.tokens)
            answer.generator = torch.Generator(self.decoder.device).manual_seed(seed)
        budget, needed = self.arguments.kv_cache_memory_bytes, answer.longest * self.decoder.token_bytes
        if budget is not None and needed > budget:
            raise ValueError(
                f"{answer.longest} tokens of prompt and answer need {needed} bytes of keys and values: raise "
                f"kv_cache_memory_bytes={budget}, or lower max_tokens"
            )
        running.answers.append(answer)

    def _check_ids(self, what: str, ids: list[int]) -> None:
        if wrong := [token for token in ids if not 0 <= token < self.vocabulary]:
            raise ValueError(f"{what} names token {wrong[0]}; the model has 0..{self.vocabulary - 1}")


# -- a model is loaded -------------------------------------------------------------------------------------------------


def load(arguments: EngineArguments) -> Loaded:
    # the model
    transformers.utils.logging.disable_progress_bar()  # no bars in a log
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    trust = {"trust_remote_code": arguments.trust_remote_code}
    model, report = AutoModelForCausalLM.from_pretrained(
        arguments.model,
        dtype=arguments.dtype if arguments.dtype == "auto" else getattr(torch, arguments.dtype),
        attn_implementation=arguments.attn_implementation,
        output_loading_info=True,
        **trust,
    )
    check_whole(arguments.model, report)
    model = model.to(device).eval()
    if arguments.parity == "exact":
        one_shape_of_experts(model)
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer or arguments.model, **trust)
    locked = LockedTokenizer(tokenizer, model.generation_config)
    if arguments.router_dtype == "float32" and model.dtype != torch.float32:
        float32_routers(model)
    # its routes, and a first forward pass: a model that does not fit is refused here
    replay = _replay(model, arguments)
    layout = None if replay is None else layout_of(replay)
    longest = _longest(model, arguments)
    width = longest if arguments.parity == "exact" else None
    decoder = BatchDecoder(model, replay, Sampler(device, arguments.seed), width)
    why_not_forced = NO_ROUTES if layout is None else ""
    vocabulary = model.get_input_embeddings().num_embeddings
    info = ReplicaInfo(
        model=arguments.model,
        layout=layout,
        max_model_len=longest,
        engine_version=f"transformers {transformers.__version__}",
        dtype=str(model.dtype).removeprefix("torch."),
        forced_routing_unavailable_reason=why_not_forced,
    )
    return Loaded(
        arguments=arguments,
        decoder=decoder,
        tokenizer=locked,
        info=info,
        routes=RequestRoutes(layout, why_not_forced, vocabulary=vocabulary),
        vocabulary=vocabulary,
        report=report,
    )


def _replay(model: PreTrainedModel, arguments: EngineArguments) -> RouterReplay | None:
    """Return the recorder of the model's routes; ``None`` if none are to be recorded."""
    wanted, moe = arguments.enable_return_routed_experts, has_experts(model)
    if wanted and not moe:
        raise ValueError(f"enable_return_routed_experts=True, but {arguments.model!r} has no experts: a dense model")
    if wanted is False or not moe:
        return None
    try:
        return RouterReplay(model)
    except UnsupportedRouterError as error:
        raise UnsupportedRouterError(f"{error}. enable_return_routed_experts=False serves it without routes") from error


def layout_of(replay: RouterReplay) -> RoutingLayout:
    """Return a model's routers as plain data."""
    # one array of routes holds all layers
    if len({(site.top_k, site.num_experts) for site in replay.sites}) > 1:
        raise UnsupportedRouterError(
            f"{type(replay.model).__name__} has routers of different sizes: enable_return_routed_experts=False serves "
            "it without routes"
        )
    return RoutingLayout(
        num_layers=replay.num_layers, moe_layers=replay.layers, top_k=replay.top_k, num_experts=replay.num_experts
    )


def _longest(model: PreTrainedModel, arguments: EngineArguments) -> int:
    text = model.config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    longest = int(limit or MAX_MODEL_LEN) if arguments.max_model_len is None else arguments.max_model_len
    if limit is not None and longest > limit:
        raise ValueError(f"max_model_len={longest}, but the model has max_position_embeddings={limit}")
    # the most tokens for which a longrope model rotates positions by the same angles
    rope = getattr(text, "rope_parameters", None) or {}
    parts = [part for part in (rope, *rope.values()) if isinstance(part, Mapping)]  # some have one for each layer type
    found = [part["original_max_position_embeddings"] for part in parts if part.get("rope_type") == "longrope"]
    same = min(found, default=longest)
    if longest > same:
        raise ValueError(
            f"{type(model).__name__} (longrope) rotates all positions by other angles once a sequence of the batch is "
            f"longer than {same}: pass max_model_len={same}; vLLM serves longer ones"
        )
    return longest
