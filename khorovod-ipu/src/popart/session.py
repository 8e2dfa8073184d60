"""``TrainingSession`` and ``InferenceSession``: a model on the software device."""

from __future__ import annotations

import json
import time
from typing import Any, NoReturn

import numpy as np
import torch

from khorovod_ipu.names import nearest
from popart.anchors import Anchors, anchor_infos
from popart.dataflow import DataFlow, InputShapeInfo
from popart.devices import DeviceInfo
from popart.enums import IrSerializationFormat, SyntheticDataMode
from popart.errors import popart_exception
from popart.execution import Exchange, Executor
from popart.logs import getLogger
from popart.options import SessionOptions
from popart.plan import SessionPlan
from popart.stepio import PyStepIO, PyStepIOCallback, PyWeightsIO
from popart.tensors import Array, TensorInfo
from popart.weights import Weights

__all__ = ["DeviceSession", "InferenceSession"]


class DeviceSession:
    """Base of training and inference. Errors about weights name a weight that does not exist or does not fit.

    Args:
        fnModel: bytes of ``builder.getModelProto()``, or a file's name.
        dataFlow: batches and anchors of a run.
        deviceInfo: device that runs it.
        inputShapeInfo: shapes of inputs that are unknown in the model.
        patterns: accepted, without effect on the software device.
        userOptions: options; they are copied, so later changes have no effect.
        name: name in logs.
        loss: id of the tensor that is minimised; empty for inference.

    Attributes:
        dataFlow: the argument.
        replicationFactor: replicas in this process.
        accumulationFactor: micro-batches per step and replica.

    Raises:
        popart_exception: the arguments are incompatible.
    """

    def __init__(
        self,
        fnModel: Any,
        dataFlow: DataFlow,
        deviceInfo: DeviceInfo,
        inputShapeInfo: InputShapeInfo | None = None,
        patterns: Any = None,
        userOptions: SessionOptions | None = None,
        name: str = "inference",
        loss: str = "",
    ) -> None:
        for what, value, kind in (("dataFlow", dataFlow, DataFlow), ("deviceInfo", deviceInfo, DeviceInfo)):
            if not isinstance(value, kind):
                raise popart_exception(f"{what} must be a popart.{kind.__name__}; received {value!r}")
        self._options = (userOptions or SessionOptions()).copy()
        self._plan = SessionPlan(fnModel, dataFlow, self._options, inputShapeInfo or InputShapeInfo(), loss)
        self._plan.check_device(deviceInfo)
        self.dataFlow, self.name, self._device = dataFlow, name, deviceInfo
        self.replicationFactor, self.accumulationFactor = self._options.replicas(), self._options.accumulation()
        self._weights = Weights(fnModel, self._plan.graph.weights, self._plan.trained)
        replicas = max(self.replicationFactor, int(self._options.globalReplicationFactor))
        self._executor = Executor(self._plan.nodes, self._weights.device, loss, self._plan.watched, replicas)
        self.setRandomSeed(0)
        self._prepared = False
        self._exchange: Exchange | None = None
        self._nanoseconds = 0
        log = getLogger("ir")
        for entry in self._plan.schedule():
            log.trace("%s %s", entry["type"], entry["name"])

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"the software device's {type(self).__name__} has no {name!r}{nearest(name, dir(type(self)))}: it compiles "
            "nothing, and has no executables, profiles or tiles. See docs/popart.md"
        )

    # -- before a run --------------------------------------------------------------------------------------------

    def prepareDevice(self, loadEngine: bool = True) -> None:
        """Prepare the device without compiling; the streams of host reduction exist from now on.

        Args:
            loadEngine: accepted.
        """
        self._prepared = True

    def setRandomSeed(self, seedValue: int) -> None:
        """Seed the random numbers of dropout and synthetic data, differently in each process of a distributed graph."""
        self._executor.generator.manual_seed(int(seedValue) + int(self._options.globalReplicaOffset))

    def initAnchorArrays(self) -> dict[str, Array]:
        """Return an array per anchor, of the shape that a run fills."""
        return {name: np.empty(info.shape(), info.numpy_dtype()) for name, info in self._anchor_infos().items()}

    def _anchor_infos(self) -> dict[str, TensorInfo]:
        infos = {name: self._plan.info(name) for name in self.dataFlow.anchors()}
        return anchor_infos(self.dataFlow, infos, self._plan.factors)

    # -- weights -------------------------------------------------------------------------------------------------

    def weightsFromHost(self) -> None:
        """Copy all weights to the device, and the optimizer's state."""
        self._weights.upload()

    def weightsToHost(self) -> None:
        """Copy all weights from the device to the host."""
        self._weights.download()

    def readWeights(self, weightsIo: PyWeightsIO) -> None:
        """Copy the host's weights into arrays; call ``weightsToHost()`` first to get the device's weights."""
        self._weights.read(weightsIo)

    def writeWeights(self, weightsIo: PyWeightsIO) -> None:
        """Copy arrays over the host's weights; ``weightsFromHost()`` then copies them to the device."""
        self._weights.write(weightsIo)

    def getWeightIds(self) -> list[str]:
        """Return the ids of all weights, trained or not, and of the optimizer's state; PopART does not have this."""
        return list(self._weights.host)

    def modelToHost(self, fn: str) -> None:
        """Write the model with the device's weights and the optimizer's state to a file; sessions resume from it."""
        self._weights.save(fn)

    def resetHostWeights(
        self, modelProtoOrFilename: Any, ignoreWeightsInModelWithoutCorrespondingHostWeight: bool = False
    ) -> None:
        """Replace the host's weights by those of another model.

        Args:
            modelProtoOrFilename: its bytes, or a file's name.
            ignoreWeightsInModelWithoutCorrespondingHostWeight: whether it may have weights that this session lacks.

        Raises:
            popart_exception: a weight is missing or does not fit.
        """
        self._weights.reset(modelProtoOrFilename, ignoreWeightsInModelWithoutCorrespondingHostWeight)

    # -- a run ---------------------------------------------------------------------------------------------------

    def run(self, stepio: PyStepIO | PyStepIOCallback, debugName: str = "") -> None:
        """Run ``batchesPerStep`` batches.

        Args:
            stepio: source of inputs and target of anchors.
            debugName: name in logs.

        Raises:
            popart_exception: the session is not ready, or inputs or anchors do not fit.
        """
        self._check_ready()
        factors = self._plan.factors
        synthetic = self._options.syntheticDataMode is not SyntheticDataMode.Off
        if not synthetic:
            spare = self._plan.graph.inputs.keys() - self._plan.inputs.keys()
            stepio.begin(self._plan.inputs, self._anchor_infos(), factors, spare)
        if self._exchange is not None:
            self._exchange.begin()
        getLogger("session").debug("run %s %s", self.name, debugName)
        began = time.perf_counter_ns()
        anchors = Anchors(self.dataFlow, factors, stepio)
        for batch in range(factors.batches):
            self._executor.forget_gradients()
            for accumulated in range(factors.accumulation):
                for replica in range(factors.replicas):
                    inputs = {name: self._input(stepio, name) for name in self._plan.inputs}
                    last = (accumulated + 1, replica + 1) == (factors.accumulation, factors.replicas)
                    values = self._micro_batch(inputs, replica, last)
                    if not synthetic:
                        anchors.take(batch, accumulated, replica, values)
            self._after_batch()
        self._nanoseconds = time.perf_counter_ns() - began

    def _micro_batch(self, inputs: dict[str, torch.Tensor], replica: int, last: bool) -> dict[str, torch.Tensor]:
        return self._executor.micro_batch(inputs, replica, 1.0)

    def _after_batch(self) -> None:
        """Do nothing: inference has no updates."""

    def _check_ready(self) -> None:
        if not self._prepared:
            raise popart_exception("call prepareDevice() before run()")
        if not self._device.isAttached:
            raise popart_exception(f"{self._device} is detached: attach() it, or run inside its with block")
        if not self._weights.uploaded and self._weights.host:
            self._without_weights()

    def _without_weights(self) -> None:
        """Upload the weights of the model, because PopART compiles them into the program."""
        self._weights.upload()

    def _input(self, stepio: PyStepIO | PyStepIOCallback, name: str) -> torch.Tensor:
        info, mode = self._plan.inputs[name], self._options.syntheticDataMode
        if mode is SyntheticDataMode.Off:
            array = stepio.feed(name, info)
            return torch.from_numpy(array if array.flags.writeable else array.copy())
        if mode is SyntheticDataMode.RandomNormal and info.torch_dtype().is_floating_point:
            return torch.randn(info.shape(), generator=self._executor.generator).to(info.torch_dtype())
        return torch.zeros(info.shape(), dtype=info.torch_dtype())

    # -- what there is to know -----------------------------------------------------------------------------------

    def getInfo(self, id: str) -> TensorInfo:
        """Return dtype and shape of a tensor, or of its gradient.

        Raises:
            popart_exception: the tensor is not in this session.
        """
        return self._plan.info(id)

    def getCycleCount(self, id: str = "") -> int:
        """Return the nanoseconds of the last run: the software device has no cycles.

        Args:
            id: accepted.

        Raises:
            popart_exception: ``instrumentWithHardwareCycleCounter`` was not set.
        """
        if not self._options.instrumentWithHardwareCycleCounter:
            raise popart_exception("getCycleCount needs SessionOptions.instrumentWithHardwareCycleCounter = True")
        return self._nanoseconds

    def getSummaryReport(self, resetProfile: bool = True) -> str:
        """Return a text saying that there is no report."""
        return "no report: the software device has no profile. Python's and torch's profilers see everything it does"

    def _serializeIr(self, format: IrSerializationFormat) -> str:
        """Return the schedule as JSON, in the format that PopART's own tests read."""
        return json.dumps({"maingraph": self._plan.schedule()})

    def getHostReduceStreamIds(self) -> list[str]:
        """Return the handles of host reduction; empty except in training with ``hostAllReduce``."""
        return []


class InferenceSession(DeviceSession):
    """Runs a model without training; ``hostAllReduce`` has no effect. See ``DeviceSession``, without ``loss``."""
