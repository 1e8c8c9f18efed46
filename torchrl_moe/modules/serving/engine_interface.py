"""What TorchRL's code uses of an engine besides ``generate``: its ``RLvLLMEngine``, and related methods.

Names and meanings are TorchRL's; what has no meaning here is refused, with what to do instead.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchrl_moe.modules.serving.actors import WEIGHTS, ActorHandle
from torchrl_moe.modules.serving.fleet import CALL_SECONDS
from torchrl_moe.modules.serving.service import GenerationService

__all__ = ["EngineInterface"]

BASE = "torchrl.modules.llm.backends.vllm.base"
WEIGHT_CALLS = frozenset({"init_weight_update_group", "load_weights_from_storage", "update_weight_broadcast"})
"""Methods of the workers that TorchRL's weight updates call."""


class EngineInterface(GenerationService):
    """A service that TorchRL's code accepts as its own engine: ``isinstance(service, RLvLLMEngine)`` holds."""

    _master_port: int | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> type[EngineInterface]:
        """The class. ``isinstance`` asks for it: only then is it known that TorchRL is loaded, which takes seconds."""
        base = getattr(sys.modules.get(BASE), "RLvLLMEngine", None)
        if base is not None:
            base.register(EngineInterface)
        return type(self)

    def __reduce__(self) -> Any:
        """Refuse: no other process could reach the replicas.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"{type(self).__name__} cannot be pickled: its replicas are children of this process. With backend='ray' "
            "an engine pickles as a handle that joins it; or have policy_factory make the policy where it is used: "
            "lambda: vLLMWrapper(AsyncVLLM.connect('name'))"
        )

    # -- actors -----------------------------------------------------------------------------------------------------

    @property
    def actors(self) -> list[ActorHandle]:
        """Handles of the replicas, in place of TorchRL's actors; their methods can be called directly."""
        return [ActorHandle(self, entry.index) for entry in self.replica_table]

    # -- what the weight sync asks ----------------------------------------------------------------------------------

    def get_tp_size(self) -> int:
        """Return the number of devices that one replica spreads its tensors over."""
        self._check_running("get_tp_size")
        return self.infos[0].tensor_parallel_size

    def get_model_metadata(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Return checkpoint name -> (dtype, shape) of every tensor, experts one by one, as the checkpoint has them."""
        self._check_running("get_model_metadata")
        return self._fleet.alive()[0].replica.metadata(CALL_SECONDS)

    def get_master_address(self) -> str:
        """Return the address for your own process group. Our senders do not need it."""
        return "127.0.0.1"

    def get_master_port(self) -> int:
        """Return a port for it, free at the first call, and the same each time."""
        if self._master_port is None:
            with socket.socket() as probe:
                probe.bind(("", 0))
                self._master_port = int(probe.getsockname()[1])
        return self._master_port

    def init_weight_update_group(self) -> None:
        """Do nothing if a sender has this engine: it has opened what weights come by. TorchRL's updaters call this.

        Raises:
            RuntimeError: the service is not running, or no sender has it.
        """
        self._check_running("init_weight_update_group")
        self._check_sender("init_weight_update_group")

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> list[Any]:
        """Call a method of every vLLM worker of every replica, and wait; one list of results per replica.

        Plain data only. TorchRL returns Ray references in their place.

        Raises:
            RuntimeError: the service is not running.
            ValueError: a method by which TorchRL sends weights; the message says what to do instead.
            EngineError: there is no such method, or it failed.
        """
        if method in WEIGHT_CALLS:
            raise ValueError(f"collective_rpc({method!r}): {WEIGHTS}")
        return super().collective_rpc(method, timeout, args, kwargs)

    # -- tests of what the workers hold -----------------------------------------------------------------------------

    def save_model_params(self) -> None:
        """Make every worker keep a copy of its parameters in host memory, for :meth:`validate_model_params`."""
        self.collective_rpc("torchrl_moe_save_params")

    def validate_model_params(self, function: Callable[[Mapping[str, torch.Tensor], torch.nn.Module], Any]) -> Any:
        """Run a check of yours inside every worker: ``function(saved_params, model)``.

        The function is pickled by value where it cannot be imported, and unpickled in the engine's own processes, which
        trust this process. Names and layouts are vLLM's: fused projections, packed experts.

        Returns:
            What the function returned, which must be plain data: one list per replica, with one value per worker.

        Raises:
            EngineError: the function raised; the message ends with its error.
        """
        import cloudpickle

        from torchrl_moe.modules.backends.process import wire

        answers = self.collective_rpc("torchrl_moe_validate", args=(cloudpickle.dumps(function),))
        return [[wire.decode(answer[0], answer[1:]) for answer in workers] for workers in answers]
