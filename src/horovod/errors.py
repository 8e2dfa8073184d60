"""Every exception that horovod raises, and its origin: "you" is the script, "the world" is another process.

    HorovodInternalError(RuntimeError)          an error of the runtime; catch this to catch all below
    |-- NotInitializedError (also ValueError)   you: init() was not called, or shutdown() was
    |-- InitError (also ValueError)             the ranks did not find each other
    |   `-- DismissedError                      elastic: this process is not a member any more; not a failure
    |-- RequestError (also ValueError)          you: the call is wrong, independent of other ranks
    |-- MismatchError                           you: ranks disagree on shape, dtype, op, root, ...
    |-- PeerLostError                           the world: another rank died or left; recoverable
    |-- StallError                              the world: a rank did not come within the timeout
    |   `-- DeadlockError                       you: ranks wait for each other, and will for ever
    DuplicateNameError(ValueError)              you: a tensor of this name is still in flight
    OptimizerUseError(AssertionError, RuntimeError)   you: gradients were touched out of turn
    LaunchError(RuntimeError)                   horovodrun or horovod.run could not run the job
    `-- CellError                               a cell of a notebook failed on a rank, or a rank was lost
    HostsUpdatedInterrupt(RuntimeError)         elastic: the set of hosts changed
    HorovodVersionMismatchError(ImportError)    never raised; scripts of Horovod may name it

Horovod's scripts catch ``HorovodInternalError``, ``ValueError`` and ``RuntimeError``; the second base
classes keep those scripts working.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = [
    "CellError",
    "DeadlockError",
    "DismissedError",
    "DuplicateNameError",
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "InitError",
    "LaunchError",
    "MismatchError",
    "NotInitializedError",
    "OptimizerUseError",
    "PeerLostError",
    "RequestError",
    "StallError",
]


class HorovodInternalError(RuntimeError):
    """A collective could not be completed."""

    if not TYPE_CHECKING:
        # AutoGraph re-creates errors to add the user's code; it keeps their class only if they have this constructor.
        __init__ = Exception.__init__


class NotInitializedError(HorovodInternalError, ValueError):
    """The call needs a running job: ``init()`` was not called yet, or ``shutdown()`` was."""


class InitError(HorovodInternalError, ValueError):
    """The ranks of the job did not find each other, or do not fit together."""


class DismissedError(InitError):
    """This process is not a member of the elastic job any more: its host was withdrawn, or it asked to leave."""


class RequestError(HorovodInternalError, ValueError):
    """The call is wrong by itself, independent of the other ranks; raised at the call.

    Horovod raised ValueError for some of these and HorovodInternalError for others; this is both.
    """


class MismatchError(HorovodInternalError):
    """Ranks submitted requests of one name that do not fit together; raised on every rank."""


class PeerLostError(HorovodInternalError):
    """Another rank died, or left the job while this one still needed it.

    Attributes:
        rank: the global rank that is gone.
        pid: its process id on its host, or 0 when it was not known.
    """

    def __init__(self, message: str, *, rank: int = -1, pid: int = 0) -> None:
        super().__init__(message)
        self.rank = rank
        self.pid = pid


class StallError(HorovodInternalError):
    """A rank did not submit, or did not go on with, a collective within the timeout."""


class DeadlockError(StallError):
    """Ranks wait for each other, and no rank can do anything to end that; raised on every rank."""


class DuplicateNameError(ValueError):
    """A tensor of the same name is still in flight on this rank."""


class OptimizerUseError(AssertionError, RuntimeError):
    """The calls of a DistributedOptimizer came in an order in which gradients would be lost, or differ between ranks.

    Horovod raised AssertionError for the cases that it detected.
    """


class LaunchError(RuntimeError):
    """The launcher could not start the job, or the job failed."""


class CellError(LaunchError):
    """A cell failed on ranks of a notebook's session, or the session has ended.

    Attributes:
        tracebacks: traceback of each rank on which it failed, by rank.
    """

    def __init__(self, message: str, tracebacks: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.tracebacks = tracebacks or {}

    def _render_traceback_(self) -> list[str]:
        # IPython shows these lines under the cell: frames of the kernel say nothing about the ranks.
        return f"{type(self).__name__}: {self}".splitlines()


class HostsUpdatedInterrupt(RuntimeError):
    """The set of hosts of an elastic job changed.

    Attributes:
        skip_sync: whether the state need not be broadcast again.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of hosts changed")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Two parts of the job run different versions. Never raised here: ``init()`` raises ``InitError``.

    Attributes:
        name: the part that differs.
        version: the version here.
        installed_version: the version there.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"{name} {version} here, but {installed_version} there; install one version everywhere")
        self.name = name
        self.version = version
        self.installed_version = installed_version
