"""A replica in a Ray cluster, as its driver sees it: the same engine process, behind an actor."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import uuid
import weakref
from multiprocessing import AuthenticationError
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from torchrl_moe.errors import EngineError
from torchrl_moe.modules.backends.process import link
from torchrl_moe.modules.backends.process.process_replica import EngineReplica
from torchrl_moe.modules.backends.ray import actor
from torchrl_moe.modules.backends.ray.actor import Description, LateStream, SealedStream, dial
from torchrl_moe.modules.backends.ray.cluster import (
    RayService,
    forwarded_environment,
    join_cluster,
    secrets_of_environment,
    shortage,
)

if TYPE_CHECKING:
    from ray.actor import ActorHandle


# A driver's end of a replica in a Ray cluster: finds its actor or places one, connects to it, and leaves it.
#
# Each replica has a placement group of one bundle, so its devices are on one node, as vLLM's ``mp`` executor needs.
# An actor of a service with a name is detached: it outlives its drivers, and Ray restarts it in its place when it
# dies. The others end with the driver that made them.


WAIT_SECONDS = 0.2
REDIALS = 9
ASK_SECONDS = 3.0
END_SECONDS = 15.0  # more than the engine process gets to end
GONE_SECONDS = 10.0

_open_links: weakref.WeakSet[ActorLink] = weakref.WeakSet()


@atexit.register  # registered after Ray's own handler, so run before it: Ray still answers
def _end_all() -> None:
    for one in list(_open_links):
        one.end_and_forget()


class _GivenUpError(Exception):
    """The link was ended while it was being made."""


class ActorLink:
    """See :class:`~torchrl_moe.modules.backends.process.process_replica.Link`."""

    def __init__(self, index: int, service: RayService, number: int, places: bool = True) -> None:
        self.driver = uuid.uuid4().hex[:8]
        self.reason = ""
        self.stream = LateStream()
        self.outbox = link.Outbox(self.stream, reader=f"the actor of replica {index}")
        self._index = index
        self._service = service
        self._number = number
        self._places = places
        self._actor: ActorHandle | None = None
        self._made: ActorHandle | None = None  # the actor, if it was placed here
        self._described = False  # so it runs
        self._group: PlacementGroup | None = None
        self._lock = threading.RLock()  # a garbage collection may end the link while this thread ends it
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._open, name=f"place-{index}", daemon=True)
        self._thread.start()
        _open_links.add(self)

    # -- the beginning ----------------------------------------------------------------------------------------------

    def _open(self) -> None:
        try:
            stream = self._dial()
            stream.send(link.message("hello", secrets_of_environment(), self.driver))
            self.stream.become(stream)
        except _GivenUpError:
            pass
        except (RayError, EngineError, AuthenticationError, EOFError, OSError, ValueError) as error:
            self.reason = f"could not be reached: {_cause(error)}"
        finally:
            self.stream.give_up()
            if not self._described:
                self._withdraw()

    def _dial(self) -> SealedStream:
        """Connect to the actor. A dying one may have closed its port since it gave its address, and is asked again."""
        for _ in range(REDIALS):
            try:
                return dial(self._reach().address)
            except (ConnectionError, EOFError):
                time.sleep(WAIT_SECONDS)
                self._check()
        return dial(self._reach().address)

    def _reach(self) -> Description:
        """Find the actor, or place one. One that is restarting or dying is asked again."""
        join_cluster(start=False)
        while True:
            self._actor = self._find() or self._place()
            try:
                if self._actor is not None:
                    reference = self._actor.describe.remote()
                    while not ray.wait([reference], timeout=WAIT_SECONDS)[0]:
                        self._check()
                    description: Description = ray.get(reference)
                    break
            except RayActorError:
                if self._made is not None:
                    raise
            time.sleep(WAIT_SECONDS)
            self._check()
        self._described = True
        self._group = description.group
        # found by its name, which another service may have taken
        if description.service != self._service:
            self._actor = self._group = None  # not ours to end
            raise ValueError(f"{self._service.actor_name(self._index)!r} belongs to another service of that name")
        return description

    def _find(self) -> ActorHandle | None:
        with contextlib.suppress(ValueError):
            return ray.get_actor(self._service.actor_name(self._index), self._service.namespace)
        return None

    def _place(self) -> ActorHandle | None:
        """Return a new actor in a new group; both may wait for resources. ``None`` if another driver was faster.

        The actor is made at once: without its name, nobody would find what a driver that is killed leaves behind.
        """
        service = self._service
        if not self._places:
            raise EngineError(f"it has no actor {service.actor_name(self._index)!r}")
        # a group first, so that all devices of a replica are on one node
        self._group = group = placement_group(
            [dict(service.resources)],
            strategy="PACK",
            name=service.group_name(self._index, self.driver),
            lifetime="detached" if service.detached else None,
        )
        try:
            self._made = self._create(group)
        except ValueError:
            if self._find() is None:
                raise
            self._free_group()
        return self._made

    def _create(self, group: PlacementGroup) -> ActorHandle:
        service = self._service
        others = {name: amount for name, amount in service.resources.items() if name not in ("CPU", "GPU")}
        kind = ray.remote(actor.ReplicaActor).options(
            name=service.actor_name(self._index),
            namespace=service.namespace,
            lifetime="detached" if service.detached else None,
            max_restarts=-1 if service.detached else 0,
            max_concurrency=4,
            num_cpus=service.resources.get("CPU", 0),
            num_gpus=service.resources.get("GPU", 0),
            resources=others,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
        )
        awaits_secrets = bool(secrets_of_environment())
        return kind.remote(self._index, service, forwarded_environment(), group, self._number, awaits_secrets)

    def _withdraw(self) -> None:
        """Remove what was made here and did not start."""
        made, self._made = self._made, None
        if made is not None:
            self._actor = None
            with contextlib.suppress(RayError):
                ray.kill(made)
        self._free_group()

    def _check(self) -> None:
        if self._given_up.is_set():
            raise _GivenUpError

    # -- the end ----------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Give up a lost connection; first note what Ray knows about it."""
        if not self._given_up.is_set() and not self.reason and self._actor is not None:
            try:
                self._ask_for_log()
                left = "" if ray.is_initialized() else ": this process has left Ray"
                self.reason = f"the connection to its actor ended{left}"
            except RayError as error:
                self.reason = _cause(error)
        self.end_and_forget()

    def end_and_forget(self) -> None:
        """Hang up. A driver that may place the actor also ends it, unless it outlives its drivers. Idempotent."""
        with self._lock:
            self._hang_up()
            if self._places and not self._service.detached:
                self._kill()

    def destroy(self) -> None:
        """Hang up and end the actor, for all its drivers. Idempotent."""
        with self._lock:
            self._hang_up()
            self._kill()

    def _hang_up(self) -> None:
        self._given_up.set()
        self._thread.join(ASK_SECONDS)  # an actor that is stuck may keep it waiting; it ends with the actor
        self.stream.give_up()
        self.outbox.close(1.0)
        self.stream.hang_up()  # the outbox may be stuck
        _open_links.discard(self)

    def _hold_successor(self) -> None:
        """Hold the actor with which another driver has replaced this link's, if any."""
        with contextlib.suppress(RayError):
            found = self._find()
            if found is None or found == self._actor:
                return
            description: Description = ray.get(found.describe.remote(), timeout=END_SECONDS)
            if description.service == self._service:
                self._actor, self._group = found, description.group

    def _kill(self) -> None:
        """End the engine cleanly, then the actor, then free what was reserved for it."""
        if not ray.is_initialized():  # then all of it is gone, or going
            return
        if self._service.detached:
            self._hold_successor()
        # the engine is asked to end, for its shared memory; the actor cannot refuse its own end
        mine, self._actor = self._actor, None
        if mine is not None:
            with contextlib.suppress(RayError):
                ray.get(mine.shut_down.remote(), timeout=END_SECONDS)
            ray.kill(mine)
        self._free_group()
        deadline = time.monotonic() + GONE_SECONDS
        while mine is not None and self._find() == mine and time.monotonic() < deadline:  # another may have its name
            time.sleep(WAIT_SECONDS / 10)

    def _free_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RayError):  # this process may just have left Ray
                remove_placement_group(group)

    # -- questions --------------------------------------------------------------------------------------------------

    @property
    def was_left(self) -> bool:
        """Whether this process has left Ray, which then ends the actor and all that is in it."""
        return not self._service.detached and not ray.is_initialized()

    def log_tail(self) -> str:
        if self.reason:
            return self.reason
        if self._actor is None or not self._described:
            group = self._group
            waits = group is not None and not group.wait(0)
            return shortage(self._service.resources) if waits else "(its actor does not answer yet)"
        try:
            return self._ask_for_log()
        except RayError as error:
            return f"(no log: {_cause(error)})"

    def _ask_for_log(self) -> str:
        if not ray.is_initialized():  # Ray would join a cluster, or start one, to ask
            return "this process has left Ray"
        assert self._actor is not None  # else nobody asks
        return str(ray.get(self._actor.log_tail.remote(), timeout=ASK_SECONDS))


def _cause(error: Exception) -> str:
    """Return the part of Ray's long report that says why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join([line for line in lines if line.startswith("The actor is dead")] or lines[-1:])
    return text.partition(" Some common causes")[0] or repr(error)


class RayReplica(EngineReplica[ActorLink]):
    """A replica whose engine process is the child of an actor; :meth:`start` joins the actor if it runs already."""

    def __init__(self, index: int, service: RayService, number: int | None = None) -> None:
        super().__init__(index)
        self._service = service
        self._places = True
        self._number = index if number is None else number

    def join(self) -> None:
        """:meth:`start`, but place no actor: if there is none, :meth:`wait_ready` raises."""
        self._places = False
        self.start()

    def _open(self) -> ActorLink:
        return ActorLink(self.index, self._service, self._number, self._places)

    def shutdown(self) -> None:
        """End the engine and its actor, for all drivers, and free what the cluster had reserved. Idempotent."""
        if self._child is None:
            return
        self._fail_all(f"replica {self.index} was shut down")
        self._child.destroy()
        self._end()

    def disconnect(self) -> None:
        """Disconnect from a replica that outlives its drivers; this driver's requests are aborted. Idempotent."""
        if self._child is None:
            return
        self._fail_all(f"replica {self.index}: this driver has left")
        self._end()

    # -- plumbing ---------------------------------------------------------------------------------------------------

    def _handle(self, kind: str, body: Any) -> None:
        if kind in ("tail", "died") and self._started().was_left:
            return  # a consequence of that; the connection ends, too, and then the link says why
        if kind == "tail":
            self._started().reason = body
        elif kind == "ended":
            self.was_ended = True
        else:
            super()._handle(kind, body)

    def _ending(self) -> str:
        return f"was lost: {self._tail()}"
