"""The methods of a session that this package calls, and sessions for several ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from horovod.bindings.misuse import wrong_argument
from horovod.errors import RequestError
from horovod.popart.pointers import Array
from horovod.popart.runtime import comm

__all__ = ["DistributedTrainingSession", "HostReducedSession", "Info", "Streams", "weights_io"]

STORE, LOAD, WEIGHT_LOAD = "gradientStore__", "gradientLoad__", "weightLoad__"
#: Prefixes of the ids of gradients: accumulated over micro-batches, and plain.
_GRADIENTS = ("FinalReducedGradient___", "Gradient___")


class Info(Protocol):
    """``popart.TensorInfo``."""

    def shape(self) -> Sequence[int]:
        """Return the dimensions."""

    def data_type_lcase(self) -> str:
        """Return NumPy's name of the dtype."""


class HostReducedSession(Protocol):
    """The methods of a PopART session that this package calls."""

    def getHostReduceStreamIds(self) -> Sequence[str]:
        """Return the handles of host reduction."""

    def connectStreamToCallback(self, handle: str, callback: Callable[[Any], None], index: int) -> None:
        """Set the callback of a stream."""

    def getInfo(self, tensor: str) -> Info:
        """Return dtype and shape of a tensor."""

    def readWeights(self, weights: Any) -> None:
        """Fill arrays with the host's weights."""

    def writeWeights(self, weights: Any) -> None:
        """Set the host's weights from arrays."""

    def weightsFromHost(self) -> None:
        """Copy the host's weights to the device."""

    def prepareDevice(self) -> None:
        """Prepare the device."""


class Streams:
    """The stream handles of one session, by kind and weight.

    Args:
        session: session after ``prepareDevice()``; before that it has no handles.

    Attributes:
        stores: handle by the weight's id.
        loads: handle by the weight's id; of gradients or of weights.
        gradients: id of the gradient by the weight's id.
        gives_weights: whether the device loads new weights instead of gradients.

    Raises:
        RequestError: a handle has an unknown kind.
    """

    def __init__(self, session: HostReducedSession) -> None:
        self.stores: dict[str, str] = {}
        self.loads: dict[str, str] = {}
        self.gradients: dict[str, str] = {}
        self.gives_weights = False
        # Sort into dicts, because the order of these streams may differ between ranks.
        for handle in session.getHostReduceStreamIds():
            if handle.startswith(STORE):
                gradient = handle.removeprefix(STORE)
                self.stores[_weight_of(gradient)] = handle
                self.gradients[_weight_of(gradient)] = gradient
            elif handle.startswith(LOAD):
                self.loads[_weight_of(handle.removeprefix(LOAD))] = handle
            elif handle.startswith(WEIGHT_LOAD):
                self.loads[handle.removeprefix(WEIGHT_LOAD)] = handle
                self.gives_weights = True
            else:
                raise RequestError(f"the session has an unknown stream of host reduction: {handle!r}")
        if self.stores.keys() != self.loads.keys():
            odd = ", ".join(sorted(self.stores.keys() ^ self.loads.keys()))
            raise RequestError(f"each weight needs a stream to store and one to load. Missing for: {odd}")


def _weight_of(gradient: str) -> str:
    for prefix in _GRADIENTS:
        if gradient.startswith(prefix):
            return gradient.removeprefix(prefix)
    return gradient


def weights_io(session: HostReducedSession, arrays: Mapping[str, Array]) -> Any:
    """Return the ``PyWeightsIO`` of the session's PopART.

    Raises:
        RequestError: ``session`` is no PopART session.
    """
    return _of_the_same_module(session, "PyWeightsIO")(dict(arrays))


def _of_the_same_module(known: Any, name: str) -> Any:
    """Return a named object from the module of an object's class, or from that module's package."""
    for base in type(known).__mro__:
        for module in (base.__module__, base.__module__.partition(".")[0], "popart"):
            if (found := getattr(sys.modules.get(module), name, None)) is not None:
                return found
    raise wrong_argument(f"expected an object of PopART. Received: {type(known).__name__}")


def DistributedTrainingSession(*, enableEngineCaching: bool = False, **arguments: Any) -> Any:
    """Make a ``popart.TrainingSession`` for one of several ranks.

    Args:
        enableEngineCaching: whether rank 0 compiles first, in ``prepareDevice()``, and the others use its cache.
        **arguments: arguments of ``popart.TrainingSession``, all by name.

    Returns:
        The session.

    Raises:
        RequestError: there are no options, or with these options every rank would train by itself.
        NotInitializedError: ``init()`` was not called.
    """
    options = arguments.get("userOptions")
    if "dataFlow" not in arguments or options is None:
        raise wrong_argument("DistributedTrainingSession takes TrainingSession's arguments by name, userOptions too")
    reduces = options.enableDistributedReplicatedGraphs or options.hostAllReduce
    if comm.size() > 1 and not reduces:
        raise wrong_argument(
            f"each of the {comm.size()} ranks would train by itself: set enableDistributedReplicatedGraphs, with "
            "globalReplicationFactor and globalReplicaOffset, or hostAllReduce"
        )
    if enableEngineCaching:
        options.enableEngineCaching = True
    session = _of_the_same_module(options, "TrainingSession")(**arguments)
    if enableEngineCaching and comm.size() > 1:
        _let_the_first_compile(session)
    return session


def _let_the_first_compile(session: Any) -> None:
    prepare = session.prepareDevice

    def in_turn(*arguments: Any) -> None:
        if comm.rank() == 0:
            prepare(*arguments)
        comm.barrier()
        if comm.rank() != 0:
            prepare(*arguments)

    session.prepareDevice = in_turn
