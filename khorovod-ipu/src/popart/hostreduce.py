"""Host allreduce: valid combinations of options, streams, and their callbacks.

Each trained weight has a stream that stores its gradient, and one that loads the host's result. Stores run during
backward, each as soon as its gradient is final; loads run after the last store. Only the thread in
``session.run()`` calls them, so a waiting load never delays a store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from khorovod_ipu.capsules import capsule_of
from popart.enums import MergeVarUpdateType, SGDAccumulatorAndMomentum
from popart.errors import popart_exception, unknown
from popart.optimizers import SGD, Optimizer
from popart.options import SessionOptions
from popart.tensors import TensorInfo, to_numpy

__all__ = [
    "COPY_PREFIX", "FINAL_GRADIENT", "GRADIENT", "VAR_COPY_PREFIX", "HostStreams", "check_host_reduce", "gradient_id",
]  # fmt: skip

GRADIENT = "Gradient___"
FINAL_GRADIENT = "FinalReducedGradient___"
COPY_PREFIX = "hostReduceGradCopy___"
VAR_COPY_PREFIX = "hostReduceVarCopy___"
_STORE, _LOAD, _WEIGHT_LOAD = "gradientStore__", "gradientLoad__", "weightLoad__"

Callback = Callable[[Any], Any]


def gradient_id(weight: str, options: SessionOptions) -> str:
    """Return the id of the gradient that is streamed for a weight."""
    return (FINAL_GRADIENT if options.accumulation() > 1 else GRADIENT) + weight


def check_host_reduce(options: SessionOptions, optimizer: Optimizer) -> None:
    """Raise if host allreduce cannot be combined with the other options.

    Raises:
        popart_exception: the options are incompatible.
    """
    if options.hostWeightUpdate and not options.hostAllReduce:
        raise popart_exception("hostWeightUpdate needs hostAllReduce: set both, or neither")
    if not options.hostAllReduce:
        return
    if options.hostAllReduceRemoteBuffer:
        raise popart_exception(
            "hostAllReduceRemoteBuffer is not imitated: the software device has one memory. Leave it out; the streams "
            "carry the gradients"
        )
    update = bool(options.hostWeightUpdate)
    momentum = isinstance(optimizer, SGD) and optimizer.has_momentum()
    excluded = [
        (update and options.enablePipelining, "hostWeightUpdate", "enablePipelining"),
        (update and options.accumulation() > 1, "hostWeightUpdate", "enableGradientAccumulation"),
        (update and momentum, "hostWeightUpdate", "an SGD with momentum, whose velocity is on the device"),
        (update and optimizer.clip_norm_settings, "hostWeightUpdate", "clip_norm_settings"),
        (options.mergeVarUpdate != MergeVarUpdateType.Off, "hostAllReduce", "mergeVarUpdate"),
        (options.enableDistributedReplicatedGraphs, "hostAllReduce", "enableDistributedReplicatedGraphs, which reduces "
         "gradients over the processes as well"),
    ]  # fmt: skip
    for wrong, one, other in excluded:
        if wrong:
            raise popart_exception(f"{one} cannot be combined with {other}: leave one of them out")
    separate = getattr(optimizer, "accumulatorAndMomentum", None) is SGDAccumulatorAndMomentum.Separate
    if not isinstance(optimizer, SGD) or separate:
        what = "SGD with separate accumulator and momentum" if separate else type(optimizer).__name__
        raise popart_exception(
            f"hostAllReduce reduces the gradients of SGD only; with {what} PopART trained each process by itself and "
            "said nothing. Use popart.SGD or popart.ConstSGD"
            f"{' with accumulatorAndMomentum=Combined' if separate else ''}, or enableDistributedReplicatedGraphs"
        )


class HostStreams:
    """The streams of one session.

    Args:
        weights: trained weights, in the order in which their gradients are expected.
        options: options of the session.

    Attributes:
        gives_weights: whether the host returns new weights instead of gradients.
    """

    def __init__(self, weights: Mapping[str, TensorInfo], options: SessionOptions) -> None:
        self._replicas = options.replicas()
        self.gives_weights = bool(options.hostWeightUpdate)
        self._gradients = {weight: gradient_id(weight, options) for weight in weights}
        self._infos = dict(weights)
        self._callbacks: dict[tuple[str, int], Callback] = {}

    def _store_handle(self, weight: str) -> str:
        return _STORE + self._gradients[weight]

    def _load_handle(self, weight: str) -> str:
        return _WEIGHT_LOAD + weight if self.gives_weights else _LOAD + self._gradients[weight]

    def ids(self) -> list[str]:
        """Return the handles of all streams, two per weight."""
        return [handle(weight) for weight in self._infos for handle in (self._store_handle, self._load_handle)]

    def connect(self, handle: str, callback: Callback, index: int) -> None:
        """Set the callback of a stream.

        Args:
            handle: one of ``ids()``.
            callback: called with a pointer to the tensor's memory.
            index: the replica of a store; a load is for all replicas, with index 0.

        Raises:
            popart_exception: the stream or the replica does not exist.
        """
        if handle not in self.ids():
            raise unknown("a stream of host reduction", handle, self.ids())
        replicas = self._replicas if handle.startswith(_STORE) else 1
        if not 0 <= index < replicas:
            why = f"this session has {replicas}" if handle.startswith(_STORE) else "one load serves all replicas: 0"
            raise popart_exception(f"{handle!r} has no replica {index}; {why}")
        self._callbacks[handle, index] = callback

    def begin(self) -> None:
        """Raise ``popart_exception`` if a stream has no callback."""
        open_ends = [handle for handle in self.ids() if (handle, 0) not in self._callbacks]
        if open_ends:
            raise popart_exception(
                f"nothing is connected to {len(open_ends)} of the host reduction's {len(self.ids())} streams, "
                f"{open_ends[0]!r} first: hvd.DistributedOptimizer(optimizer, session, options)"
                ".insert_host_allreduce(), after prepareDevice(), connects all of them; or use connectStreamToCallback"
            )

    def store(self, weight: str, gradient: torch.Tensor) -> None:
        """Pass a gradient, reduced over this process's replicas, to the host: once per replica."""
        handle = self._store_handle(weight)
        array = to_numpy(gradient)
        for replica in range(self._replicas):
            if callback := self._callbacks.get((handle, replica)):
                callback(capsule_of(array))

    def load(self, weight: str) -> torch.Tensor:
        """Return the host's result for a weight: a gradient, or the new weight."""
        info = self._infos[weight]
        array = np.zeros(info.shape(), info.numpy_dtype())
        self._callbacks[self._load_handle(weight), 0](capsule_of(array))
        return torch.from_numpy(array)
