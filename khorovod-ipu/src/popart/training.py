"""``TrainingSession``: forward, backward, gradients to the host while backward runs, updates of the weights."""

from __future__ import annotations

from typing import Any

import torch

from popart.dataflow import DataFlow, InputShapeInfo
from popart.devices import DeviceInfo
from popart.distributed import OverProcesses
from popart.enums import ReductionType
from popart.errors import popart_exception, unknown
from popart.execution import Exchange, KeptHere
from popart.hostreduce import Callback, HostStreams, check_host_reduce
from popart.optimizers import Optimizer
from popart.options import SessionOptions
from popart.session import DeviceSession
from popart.updates import Updates, clip_factors, first_state

__all__ = ["TrainingSession"]


class TrainingSession(DeviceSession):
    """A session that trains a model: ``loss`` is the id of the tensor to minimise, a single number.

    The other arguments are those of ``DeviceSession``, and the optimizer of the weights.

    Raises:
        popart_exception: the arguments are incompatible.
    """

    def __init__(
        self,
        fnModel: Any,
        dataFlow: DataFlow,
        loss: str,
        optimizer: Optimizer,
        deviceInfo: DeviceInfo,
        inputShapeInfo: InputShapeInfo | None = None,
        patterns: Any = None,
        userOptions: SessionOptions | None = None,
        name: str = "training",
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise popart_exception(f"optimizer must be popart.SGD, ConstSGD, Adam or Adaptive; received {optimizer!r}")
        options = userOptions or SessionOptions()
        check_host_reduce(options, optimizer)
        super().__init__(fnModel, dataFlow, deviceInfo, inputShapeInfo, patterns, options, name, loss)
        if not self._plan.trained and not self._plan.watched:
            raise popart_exception(
                f"the loss {loss!r} does not depend on any weight: addInitializedInputTensor makes one. "
                "A session without weights needs a Gradient___ tensor among its anchors"
            )
        self._updates = Updates(optimizer, self._weights.device)
        self._take(optimizer)
        self._streams = HostStreams(self._plan.trained, self._options) if self._options.hostAllReduce else None
        self._over_processes = OverProcesses(self._options) if self._options.enableDistributedReplicatedGraphs else None
        self._link: Exchange = self._streams or self._over_processes or KeptHere()
        self._exchange = self._link
        self._stored: list[str] = []

    # -- host reduction ------------------------------------------------------------------------------------------

    def getHostReduceStreamIds(self) -> list[str]:
        """Return the handles of host reduction, two per weight, in no order; none before ``prepareDevice()``."""
        return self._streams.ids() if self._streams is not None and self._prepared else []

    def connectStreamToCallback(self, streamHandle: str, callback: Callback, index: int = 0) -> None:
        """Set the callback of a stream.

        Args:
            streamHandle: one of ``getHostReduceStreamIds()``.
            callback: called with a capsule that points to the tensor's memory; must read it for a ``gradientStore__``,
                and fill it for a ``gradientLoad__`` or ``weightLoad__``; see ``khorovod_ipu.capsules``.
            index: the replica of a store; 0 for a load.

        Raises:
            popart_exception: the stream or the replica does not exist.
        """
        if self._streams is None or not self._prepared:
            raise popart_exception(
                "the session has no streams of host reduction: set SessionOptions.hostAllReduce = True, and call "
                "prepareDevice() before"
            )
        self._streams.connect(streamHandle, callback, int(index))

    # -- optimizer and weights -----------------------------------------------------------------------------------

    def _take(self, optimizer: Optimizer) -> None:
        """Use an optimizer, whose state becomes a part of the weights."""
        weights = self._plan.graph.weights
        for name in optimizer.named_weights():
            if name not in weights:
                raise unknown("a weight of this model, as the optimizer has a value for it", name, weights)
        for name, array in first_state(optimizer, self._plan.trained).items():
            self._weights.add(name, array)
            self._plan.shapes.add_weight(name, array)
        self._updates.optimizer = optimizer

    def updateOptimizerFromHost(self, optimizer: Optimizer) -> None:
        """Continue with other hyperparameters, and keep the state.

        Args:
            optimizer: an optimizer of the same class and algorithm, with the same constant values.

        Raises:
            popart_exception: class or algorithm differ, or a constant value has changed.
        """
        present = self._updates.optimizer
        if not isinstance(optimizer, Optimizer) or present._maps.keys() != optimizer._maps.keys():
            raise popart_exception(f"the session was made with {type(present).__name__}; received {optimizer!r}")
        if changed := present.changed_algorithm(optimizer):
            raise popart_exception(
                f"{type(present).__name__} cannot change its algorithm: {'; '.join(changed)}. Make another session"
            )
        if changed := present.changed_constants(optimizer):
            raise popart_exception(f"constant hyperparameters cannot change: {'; '.join(changed)}. (value, False) can")
        check_host_reduce(self._options, optimizer)
        self._take(optimizer)

    def broadcastWeights(self, rootRank: int = 0) -> None:
        """Copy the root's host weights to every process; weights are matched by name, in any order.

        Args:
            rootRank: the process that sends its weights.

        Raises:
            popart_exception: the session has no distributed replicated graphs.

        Blocks until all processes called.
        """
        if self._over_processes is None:
            raise popart_exception("broadcastWeights needs SessionOptions.enableDistributedReplicatedGraphs = True")
        self._over_processes.broadcast(self._weights.host, rootRank)

    def _check_ready(self) -> None:
        super()._check_ready()
        if self._over_processes is not None:
            flow, reduction = self._plan.factors, self._options.accumulationAndReplicationReductionType
            facts = {**self._updates.optimizer.facts(), "run()": f"{flow}, {reduction}"}
            if any(self._over_processes.compare(facts, self._weights.written)):
                named = "the checksum of weights and optimizer state, before broadcastWeights() and weightsFromHost(),"
                self._over_processes.compare({named: self._weights.checksum()})
            self._weights.written = False

    def _without_weights(self) -> None:
        raise popart_exception("call weightsFromHost() before run(): the device has no weights yet")

    # -- a step --------------------------------------------------------------------------------------------------

    def _micro_batch(self, inputs: dict[str, torch.Tensor], replica: int, last: bool) -> dict[str, torch.Tensor]:
        self._stored = []
        scale = self._updates.optimizer.getLossScalingVal()
        return self._executor.micro_batch(inputs, replica, scale, self._store if last else None)

    def _store(self, weight: str) -> None:
        """Pass on a final gradient; called during backward."""
        self._stored.append(weight)
        gradient, parts = self._executor.gradient(weight), self.accumulationFactor * self.replicationFactor
        if self._options.accumulationAndReplicationReductionType is ReductionType.Mean:
            parts *= self._over_processes.processes if self._over_processes else 1
            gradient = gradient / parts
        self._link.store(weight, gradient)

    @torch.no_grad()
    def _after_batch(self) -> None:
        for weight in self._plan.trained:
            if weight not in self._stored:  # the loss of this batch did not depend on this weight
                self._store(weight)
        arrived = {weight: self._link.load(weight) for weight in self._stored}
        factors = clip_factors(self._updates.optimizer, arrived)
        for weight, value in arrived.items():
            if self._link.gives_weights:
                self._weights.device[weight].copy_(value)
            else:
                self._updates.apply(weight, self._weights.device[weight], value, factors[weight])
