"""``DistributedOptimizer``: the callbacks of a session's host reduction.

A store callback sends the gradient to the other ranks and returns; a load callback waits for the result. Stores
never wait for loads, so backward continues while gradients are reduced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from horovod.bindings.agreement import agree_on_names
from horovod.bindings.misuse import out_of_turn, wrong_argument
from horovod.bindings.process_sets import global_process_set
from horovod.popart.sessions import Array, Streams, array_at, comm, weights_io

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer:
    """Averages the gradients of a training session over all ranks, on the host.

    Args:
        optimizer: the optimizer of the session.
        session: training session with ``hostAllReduce``.
        session_options: the options of the session.

    Attributes:
        optimizer: with ``hostWeightUpdate`` its learning rate, decay and loss scaling are applied here; the session's
            ``updateOptimizerFromHost`` replaces it.

    Raises:
        RequestError: the options do not enable host reduction, or enable remote buffers.
    """

    def __init__(self, optimizer: Any, session: Any, session_options: Any) -> None:
        if not getattr(session_options, "hostAllReduce", False):
            raise wrong_argument(
                "DistributedOptimizer(optimizer, session, options) reduces on the host: set options.hostAllReduce = "
                "True before the session is made"
            )
        if getattr(session_options, "hostAllReduceRemoteBuffer", False):
            raise wrong_argument(
                "hostAllReduceRemoteBuffer is not supported: leave it out, the streams carry gradients"
            )
        self.optimizer = optimizer
        self._session, self._options = session, session_options
        self._gradients: dict[str, _Gradient] = {}

    def insert_host_allreduce(self) -> None:
        """Connect every stream of the session's host reduction; call it again after an interrupted step.

        Collective over all ranks.

        Raises:
            RequestError: the session has no streams; ``prepareDevice()`` creates them.
            MismatchError: the ranks train different weights; on every rank.
            NotInitializedError: ``init()`` was not called.
            PeerLostError: a rank died or left; on the other ranks. Elastic jobs recover from it.

        Blocks until all ranks called.
        """
        comm.size()  # raises first if init() was not called
        streams = Streams(self._session)
        if not streams.stores:
            raise wrong_argument(
                "the session has no streams of host reduction: call insert_host_allreduce() after prepareDevice(), "
                "on a training session"
            )
        agree_on_names("insert_host_allreduce", list(streams.stores), global_process_set)
        for gradient in self._gradients.values():
            gradient.forget()
        weights = _HostWeights(self._session, self) if streams.gives_weights else None
        for weight, handle in streams.stores.items():
            gradient = _Gradient(self._session, weight, streams.gradients[weight])
            self._gradients[weight] = gradient
            self._session.connectStreamToCallback(handle, gradient.store, 0)
            # All replicas store the same gradient, so send only that of replica 0.
            for replica in range(1, self._replicas()):
                self._session.connectStreamToCallback(handle, _pass_over, replica)
            load = gradient.load if weights is None else weights.loader(weight, gradient)
            self._session.connectStreamToCallback(streams.loads[weight], load, 0)

    def _replicas(self) -> int:
        options = self._options
        return int(options.replicatedGraphCount) if getattr(options, "enableReplicatedGraphs", False) else 1


class _Gradient:
    """Reduction of one weight's gradient.

    Args:
        session: training session.
        weight: id of the weight.
        name: id of the gradient; also the key of the match.
    """

    def __init__(self, session: Any, weight: str, name: str) -> None:
        info = session.getInfo(weight)
        self._shape, self._dtype = tuple(info.shape()), info.data_type_lcase()
        self._name = name
        # Use memory that all ranks of the host share: a reduction there needs no further copy.
        self._memory: Array = comm.zeros(self._shape, dtype=self._dtype)
        self._handle: int | None = None

    def store(self, pointer: Any) -> None:
        """Start to reduce the gradient; called during backward, so it must not wait."""
        if self._handle is not None:
            raise out_of_turn(
                f"{self._name} was stored twice without a load: the step before was interrupted, and the ranks "
                "may be at different steps",
                "Call insert_host_allreduce() and broadcast_weights() on all of them",
            )
        np.copyto(self._memory, array_at(pointer, self._shape, self._dtype))
        self._handle = comm.allreduce_async_(self._memory, name=self._name)

    def average(self) -> Array:
        """Wait for the average over all ranks."""
        handle, self._handle = self._handle, None
        if handle is None:
            raise out_of_turn(
                f"{self._name} was loaded before it was stored", "The session calls its streams in the wrong order"
            )
        average: Array = comm.synchronize(handle)
        return average

    def load(self, pointer: Any) -> None:
        """Give the average to the device."""
        np.copyto(array_at(pointer, self._shape, self._dtype), self.average())

    def forget(self) -> None:
        """Forget the gradient of an interrupted step."""
        self._handle = None


def _pass_over(pointer: Any) -> None:
    """Do nothing: another replica stored the same gradient."""


class _HostWeights:
    """Host copies of the weights for ``hostWeightUpdate``: ``w = w * (1 - rate * decay) - rate / scaling * g``.

    Args:
        session: training session; after its ``weightsFromHost()`` the weights are read again.
        owner: its ``optimizer`` provides the hyperparameters.
    """

    def __init__(self, session: Any, owner: DistributedOptimizer) -> None:
        self._session, self._owner = session, owner
        self._weights: dict[str, Array] = {}
        upload, update = session.weightsFromHost, session.updateOptimizerFromHost

        def upload_and_notice() -> None:
            upload()
            self._weights.clear()

        def update_and_notice(optimizer: Any) -> None:
            update(optimizer)
            owner.optimizer = optimizer

        session.weightsFromHost, session.updateOptimizerFromHost = upload_and_notice, update_and_notice

    def loader(self, weight: str, gradient: _Gradient) -> Callable[[Any], None]:
        """Return the callback that gives the device a new weight."""
        info = self._session.getInfo(weight)
        shape, dtype = tuple(info.shape()), info.data_type_lcase()

        def load(pointer: Any) -> None:
            average = gradient.average()
            master = self._weights.get(weight)
            if master is None:
                master = self._weights[weight] = np.empty(shape, dtype)
                self._session.readWeights(weights_io(self._session, {weight: master}))
            # In half precision, rates divided by a loss scaling would become 0.
            decay, rate = map(np.promote_types(dtype, np.float32).type, self._factors(weight))
            master[...] = master * decay - rate * average
            np.copyto(array_at(pointer, shape, dtype), master)

        return load

    def _factors(self, weight: str) -> tuple[float, float]:
        """Return the factors of the weight and of the gradient."""
        optimizer = self._owner.optimizer
        rate, decay = optimizer.learningRates().get(weight).val(), optimizer.weightDecays().get(weight).val()
        damped = 1.0 - optimizer.dampenings().get(weight).val()
        return 1.0 - rate * damped * decay, rate * damped / optimizer.getLossScalingVal()
