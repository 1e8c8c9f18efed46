"""The public names are frozen: users import each from where the table says, and a stub stands in for none.

Their signatures are in ``public_signatures.txt``. Run this file as a program to write them again, and read the diff.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from support.sources import PACKAGE, Source, imports, package_sources, python_sources, snippet

PUBLIC: dict[str, str] = {
    "data": "KeptTokens RoutedExperts UNSET_EXPERT",
    "errors": "CollectionError CollectionStalledError DigestMismatch DivergedError EngineError GenerationTimeout "
    "ManifestMismatch MissingEntryError NoReplicaError RankError ReplayError ReplicaDiedError RequestRefusedError "
    "RouteShapeError RouteValueError RoutingError SessionClosedError SessionError SessionLimitError StaleReplicaError "
    "SyncTimeout TorchRLMoEError UnsupportedRouterError WeightSyncError WeightsOwnedError",
    "http": "HarnessEnv HttpServer Limits load_trajectories run_process serve_http",
    "modules": "AsyncVLLM Bisection ChatHistory EngineTrace LLMWrapperBase Lease LoadBalancer LogProbs Masks "
    "RouterReplay Text Tokens TransformersWrapper UnsupportedRouterError bisect_mismatch make_async_vllm_engine "
    "probe_replay vLLMWrapper",
    "weight_update": "SyncReport VLLMDoubleBufferSyncScheme VLLMDoubleBufferTransport "
    "VLLMDoubleBufferWeightReceiver VLLMDoubleBufferWeightSender VLLMWeightReceiver VLLMWeightSender "
    "VLLMWeightSyncScheme get_model_metadata",
    "collectors": "AsyncLLMCollector LLMCollector RayAsyncLLMCollector RayLLMCollector",
    "objectives": "CISPOLoss CISPOLossOutput DAPO DAPOLossOutput DPPOLoss DistillationLoss DistillationLossOutput "
    "GRPOLoss GRPOLossOutput GSPOLoss LLMLossOutput MCAdvantage MCAdvantageSelector MismatchMetrics MoERouterLoss "
    "RayMCAdvantage SAPOLoss SFTLoss SFTLossOutput k3_kl_token_estimate",
    "render": "agreement_figure expert_agreement expert_figure expert_load kept_counts kept_figure "
    "layer_agreement load_figure log_ratio_figure routes_figure show_samples staleness_figure timeline_figure "
    "training_figure",
    "trainers": "CheckpointConfig ConfigError DataConfig EngineConfig EvalConfig GRPOConfig HardwareConfig LoRAConfig "
    "LogConfig LossConfig MoEGRPOTrainer ModelConfig OptimConfig PlacementConfig RolloutConfig RunPlan "
    "SaveConfig load_config",
    "testing": "ByteTokenizer FakeAsyncVLLM Noise NoisyModel conformance make_tiny_moe without_kept_tokens",
}
SIGNATURES = Path(__file__).with_name("public_signatures.txt")


def names(table: dict[str, str]) -> set[tuple[str, str]]:
    return {(room, name) for room, line in table.items() for name in line.split()}


def seen_by_type_checkers(source: Source) -> set[str]:
    return {item.target.split(".")[-1] for item in imports(source) if item.scope == "typing"}


def lazy_rooms() -> list[Source]:
    return [s for s in package_sources() if s.path.stem == "__init__" and "attach(" in s.text]


def test_each_public_name_is_where_the_table_puts_it() -> None:
    missing = [(room, name) for room, name in names(PUBLIC) if name not in import_module(f"{PACKAGE}.{room}").__all__]
    assert missing == []


def signature(function: object) -> str:
    """Names, order and defaults: the type checker compares the types."""
    try:
        found = inspect.signature(function)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a constant, or an alias of types
        return ""
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in found.parameters.values()]
    return re.sub(r" at 0x[0-9a-f]+", "", str(inspect.Signature(bare)))


def signatures() -> Iterator[str]:
    """A line for each public name, and for each public method and property that a class of ours defines."""
    for room, name in sorted(names(PUBLIC)):
        value = getattr(import_module(f"{PACKAGE}.{room}"), name)
        yield f"{room}.{name}{signature(value)}"
        for member in sorted(dir(value)) if inspect.isclass(value) else ():
            found = inspect.getattr_static(value, member)
            found = found.__func__ if isinstance(found, classmethod | staticmethod) else found
            if not member.startswith("_") and isinstance(found, property):
                yield f"{room}.{name}.{member}: property"
            elif not member.startswith("_") and getattr(found, "__module__", "").startswith(PACKAGE):
                yield f"{room}.{name}.{member}{signature(found)}"


def test_the_signatures_are_as_they_were() -> None:
    assert list(signatures()) == SIGNATURES.read_text(encoding="utf-8").splitlines()


def test_type_checkers_see_what_a_lazy_room_exports() -> None:
    seen = {room.name: seen_by_type_checkers(room) for room in lazy_rooms()}
    assert len(seen) > 10
    assert seen == {name: set(import_module(name).__all__) for name in seen}


def test_a_name_hidden_from_type_checkers_is_found() -> None:
    room = snippet("if TYPE_CHECKING:\n    from a.b import C as C\nelse:\n    from a.b import D")
    assert seen_by_type_checkers(room) == {"C"}


if __name__ == "__main__":
    SIGNATURES.write_text("".join(f"{line}\n" for line in signatures()), encoding="utf-8")


def beyond_public(source: Source) -> list[str]:
    """Imports of ours, and of tests, that a contract test may not have: all but public names and ``support``.

    The kit that ships for tests, ``torchrl_moe.testing``, may be used as a whole.
    """
    public = {f"{PACKAGE}.{room}.{name}" for room in PUBLIC for name in import_module(f"{PACKAGE}.{room}").__all__}
    found = []
    for item in imports(source):
        top, *parts = item.target.split(".")
        kit = parts[:1] == ["testing"] and not any(part.startswith("_") for part in parts)
        if (top == PACKAGE and item.target not in public and not kit) or top in ("test", "benchmarks"):
            found.append(f"{source.at(item.node)}: {item.target}")
    return found


def test_contract_tests_import_public_names_only() -> None:
    sources = python_sources("test/contract")
    assert len(sources) > 10
    assert [line for source in sources for line in beyond_public(source)] == []


@pytest.mark.parametrize(
    "text",
    [
        "from torchrl_moe.modules.replay.router_replay import RouterReplay",
        "def f():\n    from torchrl_moe import _compat",
        "from torchrl_moe.testing.tiny_moe import _draw_weights",
    ],
)
def test_an_import_of_more_is_found(text: str) -> None:
    assert len(beyond_public(snippet(text))) == 1
