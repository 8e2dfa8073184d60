"""SGD and Adam with PopART's hyperparameters: each is a number and a constant flag; ``updates`` applies them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from khorovod_ipu.names import nearest
from popart.enums import AdamMode, AdaptiveMode, SGDAccumulatorAndMomentum, WeightDecayMode
from popart.errors import popart_exception

__all__ = [
    "SGD", "Adam", "Adaptive", "ClipNormSettings", "ConstSGD", "Optimizer", "OptimizerValue", "OptimizerValueMap",
]  # fmt: skip


class OptimizerValue:
    """One hyperparameter.

    Args:
        val: the number.
        isConst: whether ``updateOptimizerFromHost`` must not change it.
    """

    def __init__(self, val: float = 0.0, isConst: bool = True) -> None:
        self._val, self._const = float(val), bool(isConst)

    def val(self) -> float:
        """Return the number."""
        return self._val

    def isConst(self) -> bool:
        """Return whether the number is constant."""
        return self._const

    def __repr__(self) -> str:
        return f"OptimizerValue({self._val}, {self._const})"


class OptimizerValueMap:
    """A hyperparameter: a default for all weights, and values for single weights.

    Args:
        default: value for weights without their own value.
    """

    def __init__(self, default: OptimizerValue) -> None:
        self._default = default
        self._specific: dict[str, OptimizerValue] = {}

    def get(self, weight: str) -> OptimizerValue:
        """Return the value for one weight."""
        return self._specific.get(weight, self._default)

    def getDefault(self) -> OptimizerValue:
        """Return the value for weights without their own value."""
        return self._default

    def hasSpecific(self, weight: str) -> bool:
        """Return whether a weight has its own value."""
        return weight in self._specific

    def insertSpecific(self, weight: str, value: OptimizerValue) -> None:
        """Set the value of one weight."""
        self._specific[weight] = value


class ClipNormSettings:
    """A limit for the common norm of some weights' gradients.

    Args:
        weightIds: ids of the weights.
        maxNorm: the limit.
    """

    def __init__(self, weightIds: Sequence[str], maxNorm: float) -> None:
        self.weightIds: list[str] | None = list(weightIds)
        self.maxNorm = float(maxNorm)
        if not self.maxNorm > 0:
            raise popart_exception(f"maxNorm must be above 0; received {maxNorm!r}")

    @staticmethod
    def clipAllWeights(maxNorm: float) -> ClipNormSettings:
        """Return a limit for all weights together."""
        settings = ClipNormSettings([], maxNorm)
        settings.weightIds = None
        return settings


def _values_of(name: str) -> Callable[[Optimizer], OptimizerValueMap]:
    """Return a method that returns a hyperparameter's values."""
    return lambda self: self._maps[name]


class Optimizer:
    """Base of optimizers: hyperparameters by name, for all weights and for single ones.

    Args:
        values: numbers, or pairs of number and constant flag, under the names of ``DEFAULTS``.
        clip_norm_settings: limits for the norms of gradients.

    Raises:
        popart_exception: a hyperparameter does not exist, or has an invalid value.
    """

    #: name -> value, constant, used for values that are not given.
    DEFAULTS: ClassVar[Mapping[str, float]] = {"lossScaling": 1.0}
    #: Attributes that choose the algorithm: the optimizer's state has no meaning for another one.
    ALGORITHM: ClassVar[Sequence[str]] = ()

    def __init__(self, values: Mapping[str, Any], clip_norm_settings: Sequence[ClipNormSettings] = ()) -> None:
        for name in values:
            if name not in self.DEFAULTS:
                raise popart_exception(
                    f"{type(self).__name__} has no hyperparameter {name!r}{nearest(name, self.DEFAULTS)} "
                    f"It has {', '.join(self.DEFAULTS)}"
                )
        given = {name: _value(name, values[name]) if name in values else OptimizerValue(default)
                 for name, default in self.DEFAULTS.items()}  # fmt: skip
        self._loss_scaling = given.pop("lossScaling")
        self._maps = {_specific(name): OptimizerValueMap(value) for name, value in given.items()}
        self.clip_norm_settings = list(clip_norm_settings)

    def insertSpecific(self, weightId: str, values: Mapping[str, Any]) -> None:
        """Set hyperparameters of one weight.

        Args:
            weightId: the weight.
            values: as for the optimizer, with names without ``default``: ``{"learningRate": (0.1, False)}``.

        Raises:
            popart_exception: a hyperparameter does not exist.
        """
        for name, value in values.items():
            if name not in self._maps:
                known = ", ".join(self._maps)
                raise popart_exception(f"one weight has no hyperparameter {name!r}{nearest(name, self._maps)}: {known}")
            self._maps[name].insertSpecific(weightId, _value(name, value))

    def hyperparameter(self, name: str, weight: str) -> float:
        """Return a hyperparameter of one weight; ``name`` has no prefix ``default``."""
        return self._maps[name].get(weight).val()

    def named_weights(self) -> set[str]:
        """Return the ids of the weights that have values or limits of their own."""
        limited = [settings.weightIds or () for settings in self.clip_norm_settings]
        return set().union(*limited, *(values._specific for values in self._maps.values()))

    def changed_algorithm(self, other: Optimizer) -> list[str]:
        """Return the choices of the algorithm that differ in ``other``, an optimizer of the same class."""
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in self.ALGORITHM]
        return [f"{name} {a} -> {b}" for name, a, b in pairs if a != b]

    def changed_constants(self, other: Optimizer) -> list[str]:
        """Return the constant values, of all weights and of single ones, that differ in ``other``."""
        pairs = [("lossScaling", self._loss_scaling, other._loss_scaling)]
        for name, mine in self._maps.items():
            theirs = other._maps[name]
            pairs.append((name, mine.getDefault(), theirs.getDefault()))
            pairs += [(f"{name} of {weight!r}", one, theirs.get(weight)) for weight, one in mine._specific.items()]
        return [f"{name} {a.val()} -> {b.val()}" for name, a, b in pairs if a.isConst() and a.val() != b.val()]

    def facts(self) -> dict[str, str]:
        """Return, as text by name, all in which optimizers can differ."""
        parts = {"the class of the optimizer": type(self).__name__, **self._maps, **vars(self)}
        return {
            name: json.dumps(part, default=lambda one: getattr(one, "name", vars(one))) for name, part in parts.items()
        }

    def getLossScalingVal(self) -> float:
        """Return the factor of the loss before backward; gradients are divided by it."""
        return self._loss_scaling.val()

    def lossScaling(self) -> OptimizerValue:
        """Return the loss scaling and its constant flag."""
        return self._loss_scaling

    learningRates, weightDecays = _values_of("learningRate"), _values_of("weightDecay")


class SGD(Optimizer):
    """Stochastic gradient descent: ``v = momentum * v + (1 - dampening) * (g + decay * w)``, ``w -= rate * v``.

    Args:
        values: hyperparameters, see ``DEFAULTS``; each a pair of number and constant flag.
        clip_norm_settings: limits for the norms of gradients.
        accumulatorAndMomentum: whether accumulated gradients and momentum share a tensor; the numbers are the same.
        accumType: accepted, without effect on the software device.
        accl1Type: accepted, without effect on the software device.

    Raises:
        popart_exception: a hyperparameter does not exist, or has an invalid value.
    """

    DEFAULTS: ClassVar[Mapping[str, float]] = {
        "defaultLearningRate": 0.1, "defaultWeightDecay": 0.0, "defaultMomentum": 0.0, "defaultDampening": 0.0,
        "defaultVelocityScaling": 1.0, "lossScaling": 1.0,
    }  # fmt: skip

    def __init__(
        self,
        values: Mapping[str, Any] | None = None,
        clip_norm_settings: Sequence[ClipNormSettings] = (),
        accumulatorAndMomentum: SGDAccumulatorAndMomentum = SGDAccumulatorAndMomentum.Combined,
        accumType: Any = None,
        accl1Type: Any = None,
    ) -> None:
        super().__init__(values or {}, clip_norm_settings)
        self.accumulatorAndMomentum = accumulatorAndMomentum

    momentums, dampenings = _values_of("momentum"), _values_of("dampening")
    velocityScalings = _values_of("velocityScaling")  # they cancel out in exact arithmetic

    def has_momentum(self) -> bool:
        """Return whether any weight has momentum: then the optimizer has state, and is PopART's SGD1."""
        values = [self.momentums().getDefault(), *self.momentums()._specific.values()]
        return any(value.val() != 0 or not value.isConst() for value in values)


class ConstSGD(SGD):
    """SGD whose hyperparameters are constant.

    Args:
        learning_rate: learning rate of all weights.
        weight_decay: weight decay of all weights.
        loss_scaling: see ``getLossScalingVal``.
        clip_norm_settings: limits for the norms of gradients.
    """

    def __init__(
        self,
        learning_rate: float,
        weight_decay: float = 0.0,
        loss_scaling: float = 1.0,
        clip_norm_settings: Sequence[ClipNormSettings] = (),
    ) -> None:
        values = {"defaultLearningRate": learning_rate, "defaultWeightDecay": weight_decay, "lossScaling": loss_scaling}
        super().__init__(values, clip_norm_settings)


class Adam(Optimizer):
    """Adam and its variants; cannot be used with ``hostAllReduce``.

    Args:
        values: hyperparameters, see ``DEFAULTS``; each a pair of number and constant flag.
        mode: the variant.
        weight_decay_mode: whether decay acts on the weight, as in AdamW, or is part of the gradient.
        accum_type: accepted, without effect on the software device.
        accl1_type: accepted, without effect on the software device.
        accl2_type: accepted, without effect on the software device.
        clip_norm_settings: limits for the norms of gradients.

    Raises:
        popart_exception: a hyperparameter does not exist, or has an invalid value.
    """

    DEFAULTS: ClassVar[Mapping[str, float]] = {
        "defaultLearningRate": 0.1, "defaultWeightDecay": 0.0, "defaultBeta1": 0.9, "defaultBeta2": 0.999,
        "defaultEps": 1e-6, "lossScaling": 1.0, "defaultMaxWeightNorm": 10.0,
    }  # fmt: skip
    ALGORITHM: ClassVar[Sequence[str]] = ("mode", "weight_decay_mode")

    def __init__(
        self,
        values: Mapping[str, Any],
        mode: AdamMode = AdamMode.Adam,
        weight_decay_mode: WeightDecayMode = WeightDecayMode.Decay,
        accum_type: Any = None,
        accl1_type: Any = None,
        accl2_type: Any = None,
        clip_norm_settings: Sequence[ClipNormSettings] = (),
    ) -> None:
        super().__init__(values, clip_norm_settings)
        self.mode, self.weight_decay_mode = mode, weight_decay_mode


class Adaptive(Optimizer):
    """AdaGrad, RMSProp and AdaDelta; cannot be used with ``hostAllReduce``.

    Args:
        values: hyperparameters, see ``DEFAULTS``; each a pair of number and constant flag.
        mode: the algorithm.
        weight_decay_mode: whether decay acts on the weight, or is part of the gradient.
        accum_type: accepted, without effect on the software device.
        accl1_type: accepted, without effect on the software device.
        accl2_type: accepted, without effect on the software device.
        accl3_type: accepted, without effect on the software device.
        rmsprop_tf_variant: whether to compute RMSProp as TensorFlow: epsilon is added under the root, the mean square
            begins with 1, and the momentum holds steps that include the learning rate.

    Raises:
        popart_exception: a hyperparameter does not exist, or has an invalid value.
    """

    DEFAULTS: ClassVar[Mapping[str, float]] = {
        "defaultLearningRate": 0.01, "defaultWeightDecay": 0.0, "defaultAlpha": 0.99, "defaultMomentum": 0.0,
        "defaultEps": 1e-6, "lossScaling": 1.0,
    }  # fmt: skip
    ALGORITHM: ClassVar[Sequence[str]] = ("mode", "weight_decay_mode", "rmsprop_tf_variant")

    def __init__(
        self,
        values: Mapping[str, Any],
        mode: AdaptiveMode = AdaptiveMode.RMSProp,
        weight_decay_mode: WeightDecayMode = WeightDecayMode.L2Regularization,
        accum_type: Any = None,
        accl1_type: Any = None,
        accl2_type: Any = None,
        accl3_type: Any = None,
        rmsprop_tf_variant: bool = False,
    ) -> None:
        super().__init__(values)
        self.mode, self.weight_decay_mode = mode, weight_decay_mode
        self.rmsprop_tf_variant = bool(rmsprop_tf_variant)
        if rmsprop_tf_variant and mode not in (AdaptiveMode.RMSProp, AdaptiveMode.CenteredRMSProp):
            raise popart_exception(f"rmsprop_tf_variant is for RMSProp and CenteredRMSProp; received mode {mode.name}")


def _specific(name: str) -> str:
    """``defaultLearningRate`` -> ``learningRate``."""
    short = name.removeprefix("default")
    return short[:1].lower() + short[1:]


def _value(name: str, given: Any) -> OptimizerValue:
    try:
        pair = given if isinstance(given, Sequence | OptimizerValue) else (given, True)
        value = pair if isinstance(pair, OptimizerValue) else OptimizerValue(*pair)
    except (TypeError, ValueError):
        raise popart_exception(f"{name} must be (number, whether it is constant); received {given!r}") from None
    if not value.val() >= 0 or (name == "lossScaling" and not 0 < value.val() < math.inf):
        raise popart_exception(f"{name} must be at least 0, and lossScaling above 0 and finite; received {given!r}")
    return value
