"""A vLLM worker's side: the extension that our commands call, and the load of a version through vLLM's interface."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.utils.torch_utils import set_random_seed

from torchrl_moe import _compat
from torchrl_moe.errors import WeightSyncError
from torchrl_moe.modules.backends.process import link
from torchrl_moe.modules.backends.process.engine_program import end_with_leader
from torchrl_moe.modules.backends.vllm import cpu_kernels, router_dtype
from torchrl_moe.modules.backends.vllm.adapters import build_lora_request
from torchrl_moe.modules.backends.vllm.forced_routing import follow_in_workers
from torchrl_moe.modules.backends.vllm.sampling import adjust_scores, report_kept
from torchrl_moe.modules.backends.vllm.weights import StagingReport
from torchrl_moe.store import Manifest
from torchrl_moe.weight_update.transports.base import LoadingReceiver, Receiver
from torchrl_moe.weight_update.transports.registry import open_receiver

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner


NICENESS = 5
SWITCH_SECONDS = 0.0005  # of Python's interpreter lock, instead of 5 ms
T = TypeVar("T")


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Which transport, and what its receiver needs to know."""

    transport: str
    options: dict[str, object]


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Which version to load."""

    version: int


class WeightEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads versions of the weights into the worker's model, by vLLM's own interface over a transport of ours.

    vLLM asks for its weight-transfer backend at start-up, before a transport is chosen. So every engine starts with
    this one, and ``init_transfer_engine`` names the transport. A version is fetched and checked while the model
    generates. It gets into the model during a pause, by vLLM's layerwise reload:

    .. code-block:: text

        start: take layers apart --> load: reassemble each when its last tensor arrives --> finish: reassemble the rest

    Until the end the model cannot run (``whole`` is False), so a load that fails midway costs the replica its weights.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.whole = True
        self._receiver: Receiver | None = None
        self._kernels: list[tuple[object, object]] = []
        self._reading = ExitStack()  # of the version that is being loaded
        self._staging: Future[tuple[Manifest, float]] | None = None  # the version, and seconds that fetching it took
        self._asked: tuple[object, ...] | None = None  # the arguments of ``_staging``; None once another was asked for

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Open the transport, and close the previous one."""
        receiver = open_receiver(init_info.transport, init_info.options, self)
        self.shutdown()
        self._receiver = receiver

    def _open(self) -> Receiver:
        if self._receiver is None:
            raise RuntimeError("the weight transport is not initialised")
        return self._receiver

    # -- while the model generates ----------------------------------------------------------------------------------

    def stage(self, manifest: str, *, verify: bool, threads: int) -> bool:
        """Start to fetch a version. Returns at once.

        The manifest is JSON, parsed in the thread. If this version is being staged already, that continues: some
        workers may have started while another has to be asked again.
        """
        receiver = self._open()
        asked = (manifest, receiver, verify)
        if self._staging is not None and not self._staging.done():
            if self._asked == asked:
                return True
            self._asked = None  # given up: what comes of it is not used
            return False

        def fetch() -> tuple[Manifest, float]:
            started = time.perf_counter()
            found = Manifest.from_json(manifest)
            receiver.fetch(found, verify=verify, threads=threads)
            return found, time.perf_counter() - started

        self._asked = asked
        self._staging = _run_politely(fetch)
        return True

    def staged(self) -> StagingReport:
        """Return how far staging is."""
        if self._staging is None:
            raise RuntimeError("nothing was staged")
        if not self._staging.done():
            return {"running": True, "fetched": 0.0, "error": None}
        error = self._staging.exception()
        if error is not None:
            return {"running": False, "fetched": 0.0, "error": f"{type(error).__name__}: {error}"}
        return {"running": False, "fetched": self._staging.result()[1], "error": None}

    # -- under the pause --------------------------------------------------------------------------------------------

    def start_weight_update(self) -> None:
        """Take the layers apart.

        On CPU the packed expert kernels are dropped too: vLLM skips packing while one exists, and the experts
        would then be read in the wrong layout.
        """
        self.whole = False
        self._reading.close()  # of an unfinished update
        if self.device.type == "cpu":
            self._kernels += _compat.take_moe_kernels(self.model)
        _compat.forget_half_loads(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load a version. Names, shapes and digests were checked before.

        If it fails before the first tensor, the layers are put together as they were.
        """
        taken = 0
        receiver = self._open()
        if isinstance(receiver, LoadingReceiver):  # tensors come only now, and into the model at once
            receiver.load_into(self.model, self._manifest(update_info.version))
            return
        try:
            manifest = self._manifest(update_info.version)
            # until the update is finished: vLLM keeps tensors of layers that are not full, such as padded embeddings
            tensors = self._reading.enter_context(receiver.reading(manifest))

            def counted() -> Iterator[tuple[str, Tensor]]:
                nonlocal taken
                for named in tensors.items():
                    taken += 1
                    yield named

            self.model.load_weights(counted())
            if taken != len(tensors):
                raise WeightSyncError(f"the model took {taken} of {len(tensors)} tensors of version {manifest.version}")
        except BaseException:
            if not taken:
                self.finish_weight_update()
            self._reading.close()
            raise

    def _manifest(self, version: int) -> Manifest:
        """Return the manifest that was staged, since not every receiver can look one up."""
        job = self._staging
        if job is not None and job.done() and job.exception() is None and job.result()[0].version == version:
            return job.result()[0]
        return self._open().manifest(version)

    def finish_weight_update(self) -> None:
        """Reassemble the remaining layers, and restore the kernels of experts that were not loaded."""
        with self._reading:
            finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _compat.pack_tied(self.model)
        _compat.restore_moe_kernels(self._kernels)
        self._kernels = []
        self.whole = True

    def shutdown(self) -> None:
        if self._receiver is not None:
            self._receiver.close()


def _run_politely(work: Callable[[], T]) -> Future[T]:
    """Run a function in its own thread, at a lower priority, with shorter intervals of Python's interpreter lock.

    With the usual 5 ms, a step of the worker's loop would wait for that lock at each of its many short calls.
    """

    def politely() -> T:
        if sys.platform == "linux":  # only there a thread has its own priority
            thread = threading.get_native_id()
            # only upwards: lowering the nice value needs a privilege
            os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))
        before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        try:
            return work()
        finally:
            sys.setswitchinterval(before)

    executor = ThreadPoolExecutor(1, "weights")
    job = executor.submit(politely)
    executor.shutdown(wait=False)  # the thread ends with its job
    return job


# vLLM imports this module in each worker, and only there, before it makes the weight-transfer engine. Unlike an entry
# point, that needs no installed package and cannot be filtered away by VLLM_PLUGINS.
_compat.register_weight_engine()
_compat.keep_cpu_experts_with_lora()
_compat.apply_adapters_on_cpu()
_compat.refuse_bad_adapters()
_compat.zero_new_blocks()
cpu_kernels.register()
router_dtype.register()
follow_in_workers()
end_with_leader()  # the engine core, this process or its parent, does not watch its own parent


class WorkerExtension:
    """What the engine process calls by name, through ``collective_rpc``: it is mixed into vLLM's ``Worker``."""

    # Every method carries our prefix, because vLLM refuses an extension that shares a name with its worker class; the
    # attributes without it are the worker's own. None of them waits for anything: while a worker runs one, it generates
    # nothing.
    model_runner: GPUModelRunner
    weight_transfer_engine: WeightEngine
    add_lora: Callable[[LoRARequest], bool]
    torchrl_moe_saved: dict[str, Tensor]

    def torchrl_moe_router_layers(self) -> list[int]:
        """Return the sorted indices of the decoder layers that have a router.

        Read from the modules of the model that runs, never from captured values: an untouched row is all zeros, and
        zero is an expert.
        """
        return _compat.router_layer_ids(self.model_runner.get_model())

    def torchrl_moe_narrow_routers(self) -> list[str]:
        return router_dtype.narrow_routers(self.model_runner.get_model())

    def torchrl_moe_dtypes(self, names: list[str]) -> dict[str, str]:
        return router_dtype.held_dtypes(self.model_runner.get_model(), names)

    def torchrl_moe_set_seed(self, seed: int) -> None:
        """Seed the random numbers from which requests without a seed get theirs; every worker alike, as at start-up."""
        set_random_seed(seed)

    def torchrl_moe_report(self, masks: bool) -> str:
        """Report kept tokens if asked, and score as sampled; return why no request can follow experts, or ""."""
        runner = self.model_runner
        if runner.sampler is not None:  # the last pipeline stage samples
            if masks:
                report_kept(runner)
            adjust_scores(runner)
        forced = getattr(runner, "torchrl_moe_forced", None)
        return "" if forced is None else str(forced.forced_routing_unavailable_reason)

    def torchrl_moe_masks(self, on: bool) -> None:
        """Report kept tokens, or not, to measure the cost."""
        self.model_runner.sampler.torchrl_moe_on = on

    def torchrl_moe_runner(self) -> str:
        kind = type(self.model_runner)
        return f"{kind.__module__}.{kind.__qualname__}"

    def torchrl_moe_follow(self, on: bool) -> None:
        """Follow, or route live, to measure the cost; do not leave an engine that reports that it follows at live."""
        self.model_runner.torchrl_moe_forced.drive(on)

    def torchrl_moe_stage(self, manifest: str, verify: bool, threads: int) -> bool:
        """Begin to stage a version; see ``WeightEngine.stage``."""
        began: bool = self.weight_transfer_engine.stage(manifest, verify=verify, threads=threads)
        return began

    def torchrl_moe_staged(self) -> StagingReport:
        """Return how far staging is."""
        return self.weight_transfer_engine.staged()

    def torchrl_moe_whole(self) -> bool:
        """Whether the model can run: no layer of it is taken apart."""
        return self.weight_transfer_engine.whole

    def torchrl_moe_load_adapter(self, fields: dict[str, object]) -> list[str]:
        """Load an adapter, by the fields of vLLM's request; return the modules it names and this worker does not adapt.

        Both in one call: with room for one adapter only, the next step may evict it for that of a running request.
        """
        lora = build_lora_request(fields)
        assert lora is not None
        self.add_lora(lora)
        return _compat.unused_adapter_modules(self.model_runner, lora.lora_int_id)

    def torchrl_moe_save_params(self) -> int:
        """Keep a copy of the parameters in host memory, for :meth:`torchrl_moe_validate`; return how many."""
        parameters = self.model_runner.get_model().named_parameters()
        self.torchrl_moe_saved = {name: parameter.detach().to("cpu", copy=True) for name, parameter in parameters}
        return len(self.torchrl_moe_saved)

    def torchrl_moe_validate(self, function: bytes) -> list[bytes]:
        """Return, in frames, what a pickled function of the saved parameters and the model returns."""
        saved = getattr(self, "torchrl_moe_saved", {})
        return [bytes(frame) for frame in link.encode(pickle.loads(function)(saved, self.model_runner.get_model()))]
