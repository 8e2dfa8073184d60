"""``poptorch.Options``: options of execution, and groups ``Training``, ``Distributed``, ``Precision`` and others.

Options of arithmetic and of data-parallel training have an effect. Options of the hardware are kept and shown by
``toDict``, without effect.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any, TypeVar

from khorovod_ipu.names import nearest
from poptorch.choices import OutputMode, ReductionType

__all__ = ["Options"]

_Self = TypeVar("_Self", bound="_Group")

# Names of methods that are accepted without effect.
_OPTIONS = (
    "anchorTensor", "appendToLocationExcludes", "autoRoundNumIPUs", "broadcastBuffers", "connectionType",
    "disableModuleNamescope", "disableProfiling", "enableExecutableCaching", "enableProfiling", "enableStableNorm",
    "enableSyntheticData", "logCycleCount", "logDir", "maxRepeatLogs", "modelName", "relaxOptimizerAttributesChecks",
    "setAvailableMemoryProportion", "setExecutionStrategy", "showCompilationProgressBar", "sourceLocationExcludes",
    "syncPattern", "updatableNamedBuffers", "useIpuId", "useIpuModel", "useOfflineIpuTarget",
)  # fmt: skip
_TRAINING = (
    "setAutomaticLossScaling", "setConvolutionDithering", "setMeanAccumulationAndReplicationReductionStrategy",
)  # fmt: skip
_PRECISION = (
    "autocastEnabled", "autocastPolicy", "enableFloatingPointExceptions", "enableStochasticRounding",
    "halfFloatCasting", "runningStatisticsAlwaysFloat", "runningVarianceAlwaysFloat", "setPartialsType",
)  # fmt: skip
_LOCATIONS = (
    "numIOTiles", "setAccumulatorLocation", "setActivationLocation", "setOptimizerLocation", "setWeightLocation",
)  # fmt: skip

#: Options that change results, with the only value that is imitated, and the reason.
_IMITATED = {
    "broadcastBuffers": (True, "all replicas begin with the buffers of the model"),
    "enableSyntheticData": (False, "a model gets the data that it is called with"),
    "groupNormStridedChannelGrouping": (False, "a group has channels side by side"),
}


class _Group:
    """Values that methods set until they are frozen.

    Attributes:
        without_effect: names of methods that only store their arguments.
    """

    without_effect: tuple[str, ...] = ()

    def __init__(self, **values: Any) -> None:
        self._values: dict[str, Any] = dict(values)
        self._is_frozen = False

    def _set(self: _Self, name: str, value: Any) -> _Self:
        if self._is_frozen:
            raise AttributeError(
                f"{type(self).__name__}: {name} cannot be changed any more: a model or a data loader was made with "
                f"these options; make others for another one"
            )
        if name in _IMITATED and value != _IMITATED[name][0]:
            raise NotImplementedError(f"{name}={value!r} is not imitated: {_IMITATED[name][1]}. Leave it out")
        self._values[name] = value
        return self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in type(self).without_effect:
            known = [n for n in (*dir(type(self)), *type(self).without_effect) if not n.startswith("_")]
            raise AttributeError(f"{type(self).__name__!r} has no option {name!r}{nearest(name, known)}")

        def keep(*args: Any, **kwargs: Any) -> _Group:
            given = (*args, *kwargs.values())
            return self._set(name, given[0] if len(given) == 1 else given or True)

        return keep

    def toDict(self) -> dict[str, Any]:
        """Return the values, by name."""
        return dict(self._values)

    def _freeze(self) -> None:
        self._is_frozen = True

    def __deepcopy__(self: _Self, memo: dict[int, Any]) -> _Self:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        twin._is_frozen = False  # a copy may be changed
        return twin


def _kept(name: str, meaning: str) -> Any:
    """Return a property with a value of a group; None if it was never set."""
    return property(lambda self: self._values.get(name), doc=meaning)


def _count(name: str, value: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1; received {value!r}")
    return value


class TrainingOptions(_Group):
    """``Options.Training``: combination of gradients of several micro-batches and replicas."""

    without_effect = _TRAINING

    def __init__(self) -> None:
        super().__init__(gradient_accumulation=1, accumulation_and_replication_reduction_type=ReductionType.Mean)

    gradient_accumulation = _kept("gradient_accumulation", "Micro-batches that are added up before each step.")
    reduction = _kept("accumulation_and_replication_reduction_type", "How gradients are combined: mean or sum.")

    def gradientAccumulation(self, gradient_accumulation: int) -> TrainingOptions:
        """Set the number of micro-batches whose gradients are summed before each optimizer step.

        Args:
            gradient_accumulation: number of micro-batches; 1 by default.
        """
        return self._set("gradient_accumulation", _count("gradientAccumulation", gradient_accumulation))

    def accumulationAndReplicationReductionType(self, reduction_type: ReductionType) -> TrainingOptions:
        """Choose the mean or the sum of the gradients over micro-batches and over all replicas of all instances.

        Args:
            reduction_type: ``Mean``, the default, or ``Sum``.

        Raises:
            ValueError: the type is unknown.
        """
        if reduction_type not in (ReductionType.Mean, ReductionType.Sum):
            raise ValueError(f"accumulationAndReplicationReductionType takes Mean or Sum; received {reduction_type!r}")
        return self._set("accumulation_and_replication_reduction_type", ReductionType(reduction_type))

    accumulationReductionType = accumulationAndReplicationReductionType


class DistributedOptions(_Group):
    """``Options.Distributed``: the number of processes that train together, and the index of this one."""

    without_effect = ("IPUoFConfigFiles", "getGcdConfigFile")

    def __init__(self) -> None:
        super().__init__()
        self._names = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
        self.setEnvVarNames(*self._names)

    numProcesses = _kept("num_distributed_processes", "Number of processes that train together.")
    processId = _kept("distributed_process_id", "Number of this process.")

    def disable(self) -> DistributedOptions:
        """Train only in this process."""
        return self.configureProcessId(0, 1)

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> DistributedOptions:
        """Read the index of this process and the number of processes from the environment.

        Args:
            var_num_processes: variable with the number of processes.
            var_process_id: variable with the index of this process.
        """
        count, own = os.environ.get(var_num_processes), os.environ.get(var_process_id)
        if (count is None or own is None) and (var_num_processes, var_process_id) == self._names:
            import popdist

            if popdist.isPopdistEnvSet():
                return self.configureProcessId(popdist.getInstanceIndex(), popdist.getNumInstances())
            count, own = os.environ.get("HOROVOD_SIZE"), os.environ.get("HOROVOD_RANK")  # set by horovodrun
        if count is None or own is None:
            return self.configureProcessId(0, 1)
        return self.configureProcessId(int(own), int(count))

    def configureProcessId(self, process_id: int, num_processes: int) -> DistributedOptions:
        """Set the index of this process and the number of processes.

        Args:
            process_id: index of this process, from 0.
            num_processes: number of processes that train together.

        Raises:
            ValueError: the process does not exist.
        """
        if not 0 <= process_id < num_processes:
            raise ValueError(f"process_id must be at least 0 and below {num_processes}; received {process_id}")
        return self._set("distributed_process_id", process_id)._set("num_distributed_processes", num_processes)


class PrecisionOptions(_Group):
    """``Options.Precision``: stored without effect, because torch computes in the dtypes of the model."""

    without_effect = _PRECISION


class TensorLocationOptions(_Group):
    """``Options.TensorLocations``: stored without effect, because all tensors are in host memory."""

    without_effect = _LOCATIONS


class _PopartOptions(_Group):
    without_effect = ("setPatterns",)
    set = _Group._set


class Options(_Group):
    """The options of a model. Methods return the object, so that calls can be chained.

    Attributes:
        Training: see ``TrainingOptions``.
        Distributed: see ``DistributedOptions``.
        Precision: kept, without effect.
        TensorLocations: kept, without effect.
    """

    without_effect = _OPTIONS

    def __init__(self) -> None:
        super().__init__(
            replication_factor=1, device_iterations=1, output_mode=OutputMode.Default, output_return_period=1
        )
        self.Training = TrainingOptions()
        self.Distributed = DistributedOptions()
        self.Precision = PrecisionOptions()
        self.TensorLocations = TensorLocationOptions()
        self._Popart = _PopartOptions()

    @property
    def _groups(self) -> tuple[_Group, ...]:
        return self.Training, self.Distributed, self.Precision, self.TensorLocations, self._Popart

    replication_factor = _kept("replication_factor", "Replicas in this process.")
    device_iterations = _kept("device_iterations", "Batches that one call runs, one after the other.")
    output_mode = _kept("output_mode", "The results that come back.")
    output_return_period = _kept("output_return_period", "For ``OutputMode.EveryN``, its n.")
    random_seed = _kept("random_seed", "The seed, where one was set.")

    def replicationFactor(self, replication_factor: int) -> Options:
        """Set the number of replicas of the model in this process; each gets its own part of a batch.

        Args:
            replication_factor: number of replicas; 1 by default.
        """
        return self._set("replication_factor", _count("replicationFactor", replication_factor))

    def deviceIterations(self, device_iterations: int) -> Options:
        """Set the number of batches that one call runs in sequence; training makes a step after each.

        Args:
            device_iterations: number of batches; 1 by default.
        """
        return self._set("device_iterations", _count("deviceIterations", device_iterations))

    def outputMode(self, output_mode: OutputMode, output_return_period: int | None = None) -> Options:
        """Choose the results that a call returns.

        Args:
            output_mode: ``Final`` is the default for training, ``All`` for inference.
            output_return_period: n of ``EveryN``, which returns all micro-batches of every n-th device iteration; must
                divide the number of device iterations.
        """
        period = output_return_period if output_mode == OutputMode.EveryN else 1
        self._set("output_return_period", _count("output_return_period", period))
        return self._set("output_mode", OutputMode(output_mode))

    anchorMode = outputMode

    def randomSeed(self, random_seed: int) -> Options:
        """Seed the replicas, each differently, and the order of shuffled data.

        Args:
            random_seed: the seed, the same on all instances.
        """
        return self._set("random_seed", int(random_seed))

    def toDict(self) -> dict[str, Any]:
        """Return the values by name, including those of the groups, in one dictionary."""
        found = super().toDict()
        for group in self._groups:
            found.update(group.toDict())
        return found

    def clone(self: _Self) -> _Self:
        """Return a copy that can be changed."""
        return copy.deepcopy(self)

    def _freeze(self) -> None:
        super()._freeze()
        for group in self._groups:
            group._freeze()
