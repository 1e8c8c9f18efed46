"""The Ray actor that a collector runs in: how it is placed, called and ended."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from torchrl_moe.collectors.collector_host import CollectorHost
from torchrl_moe.errors import CollectionError
from torchrl_moe.modules.backends.ray.cluster import join_cluster, shortage
from torchrl_moe.modules.serving.launch import TIMEOUT_VARIABLE, default_timeout

CALLS = 8
"""Calls that the actor handles concurrently."""
HOW_TO_SEND = {
    "policy": "pass policy_factory=, which makes the policy in the actor. There it can connect to a shared engine: "
    "lambda: vLLMWrapper(AsyncVLLM.connect('name'))",
    "env": "pass a callable that makes it",
}


def actor_options(remote_config: Mapping[str, object] | None, **resources: float | None) -> dict[str, object]:
    """Return Ray's options for the actor; a resource may be named in both places if they agree."""
    options = {"max_concurrency": CALLS, **(remote_config or {})}
    for name, asked in resources.items():
        if asked is not None and options.setdefault(name, asked) != asked:
            raise ValueError(f"{name}={asked} and remote_config={remote_config!r} differ: pass one")
    return options


class RemoteHost:
    """A :class:`CollectorHost` in an actor. It ends with :meth:`end`, with this object and with this process."""

    def __init__(
        self,
        kind: str,
        arguments: Mapping[str, object],
        options: Mapping[str, object],
        ray_init_config: Mapping[str, object] | None = None,
    ) -> None:
        if ray_init_config is None:
            join_cluster()
        elif not ray.is_initialized():
            ray.init(**ray_init_config)
        # first what cannot be sent, since a place in the cluster may take minutes
        sent = _put(arguments)
        self._actor = _place(options)
        try:
            self.dialog_turns_per_batch: int | None = self.wait(self._actor.make.remote(kind, sent))
        except BaseException:
            self._kill()
            raise

    def begin(self, method: str, *arguments: object) -> ObjectRef:
        """Call a method of the :class:`CollectorHost`; return a reference to its result."""
        if not ray.is_initialized():  # a call would start another cluster
            raise CollectionError("Ray was shut down, and the collector's actor with it")
        return getattr(self._actor, method).remote(*arguments)

    def wait(self, reference: ObjectRef) -> Any:
        """Wait for a method's result; errors are raised as they were in the actor."""
        try:
            return ray.get(reference)
        except RayTaskError as error:
            if isinstance(error.cause, RayError):  # Ray's stand-in for an error that cannot be pickled
                raise CollectionError(str(error.cause)) from error
            raise error.cause from error
        except RayError as error:
            raise CollectionError(f"the collector's actor gave no answer: {error}") from error

    def is_done(self, reference: ObjectRef, seconds: float | None = 0.0) -> bool:
        """Whether a method has returned or raised within some seconds; ``None``: wait without limit."""
        return bool(ray.wait([reference], timeout=seconds)[0])

    def end(self, seconds: float, awaited: ObjectRef | None, *arguments: object) -> None:
        """Shut the collector down and end the actor, whatever state it is in."""
        if ray.is_initialized():  # else it is gone
            try:
                self.is_done(self._actor.shutdown.remote(*arguments), seconds)
            finally:
                self._kill()
            if awaited is not None:
                with contextlib.suppress(Exception):  # read, so that Ray does not log it as unhandled
                    self.wait(awaited)

    def _kill(self) -> None:
        ray.kill(self._actor)


def _put(arguments: Mapping[str, object]) -> ObjectRef:
    """Put arguments into Ray's object store."""
    try:
        return ray.put(dict(arguments))
    except Exception:  # pickling calls the user's code, which may raise anything
        # find out which one it was: Ray's error does not say
        for name, value in arguments.items():
            try:
                ray.cloudpickle.dumps(value)
            except Exception as error:
                how = HOW_TO_SEND.get(name, "pass what can be pickled")
                raise TypeError(f"{name}= cannot be sent to the collector's actor ({error!r}): {how}") from error
        raise


def _place(options: Mapping[str, Any]) -> ActorHandle:
    """Return an actor once it is placed."""
    actor = ray.remote(CollectorHost).options(**options).remote()
    seconds = default_timeout()
    try:
        if ray.wait([actor.__ray_ready__.remote()], timeout=seconds)[0]:
            return actor
        # it may still come: say what it waits for, and do not leave it in the cluster's queue
        asked = {"CPU": options.get("num_cpus", 1), "GPU": options.get("num_gpus"), **(options.get("resources") or {})}
        waits_for = shortage({name: float(amount) for name, amount in asked.items() if amount})
        raise CollectionError(
            f"the collector's actor was not placed within {seconds:g} s (the environment's {TIMEOUT_VARIABLE}). "
            f"{waits_for}"
        )
    except BaseException:
        with contextlib.suppress(RayError):
            ray.kill(actor)
        raise
