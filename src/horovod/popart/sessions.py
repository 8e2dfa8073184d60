"""Sessions for several ranks: their streams and host weights.

The session may be the vendor's or the software one. This package calls its ``prepareDevice``, ``getInfo``,
``getHostReduceStreamIds``, ``connectStreamToCallback``, ``readWeights``, ``writeWeights``, ``weightsFromHost`` and
``updateOptimizerFromHost``.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from horovod.bindings.agreement import agree_on_names
from horovod.bindings.collectives import Collectives
from horovod.bindings.misuse import wrong_argument
from horovod.bindings.numpy_adapter import NumpyAdapter
from horovod.bindings.process_sets import global_process_set
from horovod.errors import RequestError

__all__ = ["Array", "DistributedTrainingSession", "Streams", "array_at", "broadcast_weights", "comm", "weights_io"]

STORE, LOAD, WEIGHT_LOAD = "gradientStore__", "gradientLoad__", "weightLoad__"
#: Prefixes of the ids of gradients: accumulated over micro-batches, and plain.
_GRADIENTS = ("FinalReducedGradient___", "Gradient___")

Array = np.ndarray[Any, np.dtype[Any]]
comm = Collectives(NumpyAdapter())

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def array_at(pointer: Any, shape: Sequence[int], dtype: str) -> Array:
    """Return an array over the caller's memory; it is valid only while the callback runs.

    Args:
        pointer: a capsule without a name, as PopART's Python passes it; or an address.
        shape: shape of the tensor.
        dtype: NumPy's name of the dtype.
    """
    kind = np.dtype(dtype)
    address = pointer if isinstance(pointer, int) else _pointer_of(pointer, None)
    memory: Any = (ctypes.c_char * (math.prod(shape) * kind.itemsize)).from_address(address)
    array: Array = np.ndarray(tuple(shape), kind, memory)
    return array


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

    def __init__(self, session: Any) -> None:
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


def weights_io(session: Any, arrays: Mapping[str, Array]) -> Any:
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


def broadcast_weights(session: Any, root_rank: int = 0) -> None:
    """Copy the root's host weights to every rank; ``weightsFromHost()`` then copies them to the device.

    Collective over all ranks. Later in training, call ``weightsToHost()`` first, which fetches the device's weights.
    A software session broadcasts all weights, also running means; another session only those with reduced gradients.

    Args:
        session: training session after ``prepareDevice()``.
        root_rank: rank that sends its weights.

    Raises:
        RequestError: the session lists no weights.
        MismatchError: the names, or a weight's shape or dtype, differ between ranks; on every rank.
        PeerLostError: a rank died or left; on the other ranks. Elastic jobs recover from it.

    Blocks until all weights have arrived.
    """
    listed = getattr(session, "getWeightIds", None)
    names = sorted(listed() if listed is not None else Streams(session).stores)
    if not names:
        raise wrong_argument(
            "broadcast_weights finds no weights: it takes them from the streams of host reduction, which a training "
            "session with hostAllReduce has after prepareDevice()"
        )
    agree_on_names("broadcast_weights", names, global_process_set)
    infos = {name: session.getInfo(name) for name in names}
    arrays = {name: np.empty(tuple(info.shape()), info.data_type_lcase()) for name, info in infos.items()}
    session.readWeights(weights_io(session, arrays))
    # Match weights by name, because their order may differ between ranks.
    handles = [comm.broadcast_async_(array, root_rank, name=f"weights.{name}") for name, array in arrays.items()]
    for handle in handles:
        comm.synchronize(handle)
    session.writeWeights(weights_io(session, arrays))
