"""``hostWeightUpdate``: host copies of the weights; a step updates them and sends them to the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from horovod.popart.pointers import Array, array_at
from horovod.popart.sessions import HostReducedSession, weights_io

__all__ = ["HostWeights"]


class _Owner(Protocol):
    optimizer: Any


class _Gradient(Protocol):
    def average(self) -> Array: ...


class HostWeights:
    """Weights updated on the host: ``w = w * (1 - rate * decay) - rate / scaling * g``.

    Args:
        session: training session; after its ``weightsFromHost()`` the weights are read again.
        owner: object whose ``optimizer`` provides the hyperparameters.
    """

    def __init__(self, session: HostReducedSession, owner: _Owner) -> None:
        self._session, self._owner = session, owner
        self._weights: dict[str, Array] = {}
        upload = session.weightsFromHost

        def upload_and_notice() -> None:
            upload()
            self._weights.clear()

        session.weightsFromHost = upload_and_notice  # type: ignore[method-assign]

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
            decay, rate = self._factors(weight)
            master *= _in_dtype_of(master, decay)
            master -= _in_dtype_of(master, rate) * average
            np.copyto(array_at(pointer, shape, dtype), master)

        return load

    def _factors(self, weight: str) -> tuple[float, float]:
        """Return the factors of the weight and of the gradient."""
        optimizer = self._owner.optimizer
        rate, decay = optimizer.learningRates().get(weight).val(), optimizer.weightDecays().get(weight).val()
        damped = 1.0 - optimizer.dampenings().get(weight).val()
        return 1.0 - rate * damped * decay, rate * damped / optimizer.getLossScalingVal()


def _in_dtype_of(array: Array, number: float) -> Any:
    """Return a number in an array's own dtype, because the device computes in that dtype."""
    return array.dtype.type(number)
