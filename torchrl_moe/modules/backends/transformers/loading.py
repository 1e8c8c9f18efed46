"""Loads a model of transformers, tests that it can serve, and builds what an engine process needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_moe._compat_transformers import check_whole, one_shape_of_experts
from torchrl_moe.data import RoutingLayout
from torchrl_moe.errors import UnsupportedRouterError
from torchrl_moe.modules.backends.replica import ReplicaInfo
from torchrl_moe.modules.backends.request_routes import RequestRoutes
from torchrl_moe.modules.backends.transformers.answer import LockedTokenizer
from torchrl_moe.modules.backends.transformers.decoder import BatchDecoder, RequestReader, Sampler
from torchrl_moe.modules.backends.transformers.transformers_arguments import EngineArguments
from torchrl_moe.modules.replay.discovery import has_experts
from torchrl_moe.modules.replay.float32 import float32_routers
from torchrl_moe.modules.replay.router_replay import RouterReplay

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

NO_ROUTES = "the engine captures no routes"
MAX_MODEL_LEN = 8192  # of a model that names no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model that can serve."""

    arguments: EngineArguments
    decoder: BatchDecoder
    reader: RequestReader
    info: ReplicaInfo
    report: Mapping[str, Iterable[str]]


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
    decoder = _decoder(model, replay, Sampler(device, arguments.seed), width)
    forced_routing_unavailable_reason = NO_ROUTES if layout is None else ""
    vocabulary = model.get_input_embeddings().num_embeddings
    # what requests are checked by
    reader = RequestReader(
        arguments=arguments,
        max_model_len=longest,
        vocabulary=vocabulary,
        token_bytes=decoder.token_bytes,
        tokenizer=locked,
        layout=layout,
        routes=RequestRoutes(layout, forced_routing_unavailable_reason, vocabulary=vocabulary),
        device=device,
    )
    info = ReplicaInfo(
        model=arguments.model,
        layout=layout,
        max_model_len=longest,
        engine_version=f"transformers {transformers.__version__}",
        dtype=str(model.dtype).removeprefix("torch."),
        forced_routing_unavailable_reason=forced_routing_unavailable_reason,
    )
    return Loaded(arguments=arguments, decoder=decoder, reader=reader, info=info, report=report)


def _decoder(
    model: PreTrainedModel, replay: RouterReplay | None, sampler: Sampler, width: int | None = None
) -> BatchDecoder:
    """Return the decoder, or raise if the model's forward pass fails in it: it may need another kind of cache."""
    try:
        return BatchDecoder(model, replay, sampler, width)
    except (AttributeError, LookupError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"engine='transformers' cannot serve {type(model).__name__}: its forward pass with a DynamicCache failed, "
            f"{type(error).__name__}: {error}; try vLLM"
        ) from error


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
    same = _same_angles(text)
    if same is not None and longest > same:
        raise ValueError(
            f"{type(model).__name__} (longrope) rotates all positions by other angles once a sequence of the batch is "
            f"longer than {same}: pass max_model_len={same}; vLLM serves longer ones"
        )
    return longest


def _same_angles(config: PretrainedConfig) -> int | None:
    """Return the most tokens for which a longrope model rotates positions by the same angles; else ``None``."""
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [part for part in (rope, *rope.values()) if isinstance(part, Mapping)]  # some have one for each layer type
    found = [part["original_max_position_embeddings"] for part in parts if part.get("rope_type") == "longrope"]
    return min(found, default=None)
