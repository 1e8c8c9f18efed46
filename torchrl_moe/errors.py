"""The error tree. A wrong argument is a plain ``ValueError`` or ``TypeError``, a wrong setting a ``ConfigError``.

.. code-block:: text

    TorchRLMoEError
    ├── RoutingError                 routes that cannot be used
    │   ├── RouteShapeError          (ValueError) rank, rows, layers or columns are wrong
    │   ├── RouteValueError          (ValueError) an id is out of range, repeated or missing
    │   ├── ReplayError              routes and forward pass do not fit together
    │   └── UnsupportedRouterError   this router cannot be replayed exactly
    ├── EngineError                  the generation service
    │   ├── ReplicaDiedError         a replica's process ended, or never came up
    │   ├── NoReplicaError           no replica may take the request
    │   ├── GenerationTimeout        (TimeoutError) requests did not finish in time
    │   ├── RequestRefusedError      (ValueError) an engine would not take a request
    │   └── StaleReplicaError        no replica holds the version asked for
    ├── CollectionError              a collector cannot continue
    │   └── CollectionStalledError   (TimeoutError) nothing has moved for too long
    ├── MissingEntryError            (KeyError, ValueError) a batch of a loss or trainer lacks an entry
    ├── DivergedError                a run's gradients or weights are no longer finite
    ├── RankError                    another rank of a run failed, or did not come in time
    ├── SessionError                 a session of the HTTP server cannot do what was asked
    │   ├── SessionClosedError       it has ended
    │   └── SessionLimitError        too many sessions, or too many tokens of one
    └── WeightSyncError              a weight update did not take effect
        ├── ManifestMismatch         (ValueError) names, shapes or dtypes differ
        ├── DigestMismatch           the bytes that arrived are not those that were sent
        ├── WeightsOwnedError        another driver updates the engine
        └── SyncTimeout              (TimeoutError)

A message says what is wrong, what was given, what is allowed and what to do.

>>> issubclass(GenerationTimeout, TimeoutError) and issubclass(GenerationTimeout, TorchRLMoEError)
True
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "CollectionError",
    "CollectionStalledError",
    "DigestMismatch",
    "DivergedError",
    "EngineError",
    "GenerationTimeout",
    "ManifestMismatch",
    "MissingEntryError",
    "NoReplicaError",
    "RankError",
    "ReplayError",
    "ReplicaDiedError",
    "RequestRefusedError",
    "RouteShapeError",
    "RouteValueError",
    "RoutingError",
    "SessionClosedError",
    "SessionError",
    "SessionLimitError",
    "StaleReplicaError",
    "SyncTimeout",
    "TorchRLMoEError",
    "UnsupportedRouterError",
    "WeightSyncError",
    "WeightsOwnedError",
]


class TorchRLMoEError(Exception):
    """Root of the tree."""


class RoutingError(TorchRLMoEError):
    """Routes that cannot be used."""


class RouteShapeError(RoutingError, ValueError):
    """Routes of the wrong rank, row count, layer count or width."""


class RouteValueError(RoutingError, ValueError):
    """Routes with an id that is out of range, repeated, or missing."""


class ReplayError(RoutingError):
    """Routes and the forward pass they are replayed in do not fit together."""


class UnsupportedRouterError(RoutingError):
    """A router whose choice cannot be replayed exactly."""


class EngineError(TorchRLMoEError):
    """The generation service cannot do what was asked.

    Args:
        message: why.
        partial: of a call: one completion per request, in input order. A request that had not finished has what was
            generated so far; ``generate(resume=error.partial)`` finishes it.
    """

    def __init__(self, message: str = "", partial: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.partial = list(partial)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.partial), self.__dict__  # with its notes


class ReplicaDiedError(EngineError):
    """A replica's process ended, or never came up."""


class NoReplicaError(EngineError):
    """No replica may take the request."""


class GenerationTimeout(EngineError, TimeoutError):
    """Requests that did not finish in time; they were aborted on their replicas."""


class RequestRefusedError(EngineError, ValueError):
    """Requests that an engine refused: too long, or with parameters that it does not take."""


class StaleReplicaError(EngineError):
    """No replica holds the weight version that was asked for."""


class CollectionError(TorchRLMoEError):
    """A collector cannot continue."""


class CollectionStalledError(CollectionError, TimeoutError):
    """A collector made no progress for too long; the message says what it waits for."""


class MissingEntryError(TorchRLMoEError, KeyError, ValueError):
    """A batch lacks an entry that a loss or trainer needs. TorchRL's losses raise ``KeyError`` for some, ``ValueError``
    for others.
    """

    def __str__(self) -> str:
        return Exception.__str__(self)  # a KeyError prints its message in quotes


class DivergedError(TorchRLMoEError):
    """A training run whose gradients, step after step, or whose weights are not finite: it cannot learn any more."""


class RankError(TorchRLMoEError):
    """Another rank of a training run failed, or did not come in time; the message says which, and where."""


class SessionError(TorchRLMoEError):
    """A session of the HTTP server cannot do what was asked."""


class SessionClosedError(SessionError):
    """A session that has ended takes no more calls."""


class SessionLimitError(SessionError):
    """A server has as many sessions, or a session as many tokens, as its limits allow."""


class WeightSyncError(TorchRLMoEError):
    """A weight update did not take effect.

    Args:
        message: what failed.
        report: the ``SyncReport`` of an update that too few replicas took, else ``None``.
    """

    def __init__(self, message: str, report: Any = None) -> None:
        super().__init__(message)
        self.report = report

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.report), self.__dict__  # with its notes


class ManifestMismatch(WeightSyncError, ValueError):
    """Names, shapes or dtypes differ between what is sent and what is expected."""


class DigestMismatch(WeightSyncError):
    """The bytes that arrived are not those that were sent."""


class WeightsOwnedError(WeightSyncError):
    """Another driver, which is alive, updates the weights of the engine."""


class SyncTimeout(WeightSyncError, TimeoutError):
    """A step of a weight update did not finish in time."""
