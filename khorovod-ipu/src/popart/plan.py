"""Plan of a session, from model and options: nodes, trained weights, shapes and schedule."""

from __future__ import annotations

from typing import Any

from popart.dataflow import DataFlow, InputShapeInfo
from popart.devices import DeviceInfo
from popart.enums import DeviceType, ReductionType, VirtualGraphMode
from popart.errors import popart_exception, unknown
from popart.hostreduce import COPY_PREFIX, FINAL_GRADIENT, GRADIENT, VAR_COPY_PREFIX, gradient_id
from popart.kernels import GraphNode, find
from popart.model import read_graph
from popart.options import SessionOptions
from popart.shapes import Shapes
from popart.stepio import Factors
from popart.tensors import TensorInfo

__all__ = ["SessionPlan"]

#: Operators that stop gradients, in addition to those whose results are not floats.
_STOPS = (
    "Detach", "Sign", "Floor", "Ceil", "Round", "ConstantOfShape", "EyeLike", "RandomNormalLike", "RandomUniformLike",
)  # fmt: skip
#: Inputs that are statistics, not weights.
_STATISTICS = {"BatchNormalization": (3, 4)}


class SessionPlan:
    """The plan of a session.

    Args:
        model: bytes of a model, or a file's name.
        flow: inputs and anchors of a run.
        options: options of the session.
        shapes: shapes of inputs that are unknown in the model.
        loss: id of the tensor that is minimised; empty for inference.

    Attributes:
        graph: the whole model.
        nodes: the computed nodes, in order.
        shapes: dtypes and shapes of all computed tensors.
        inputs: dtypes and shapes of the used inputs, by id.
        trained: the weights that the optimizer changes, in the order in which their gradients are expected.
        watched: ids of tensors whose gradients are anchors.
        factors: numbers of micro-batches of a run.

    Raises:
        popart_exception: model, options or anchors are incompatible.
    """

    def __init__(
        self, model: Any, flow: DataFlow, options: SessionOptions, shapes: InputShapeInfo, loss: str = ""
    ) -> None:
        self.graph, self.loss, self._options = read_graph(model), loss, options
        self._check_factors(bool(loss))
        self.factors = Factors(flow.batchesPerStep(), options.accumulation(), options.replicas())
        anchors = flow.anchors()
        self.watched = [name.removeprefix(GRADIENT) for name in anchors if loss and name.startswith(GRADIENT)]
        values = [name for name in anchors if not (loss and name.startswith(GRADIENT))]
        self.nodes = self.graph.needed_for([*values, *self.watched, *([loss] if loss else [])])
        if options.groupNormStridedChannelGrouping and any(node.op == "GroupNormalization" for node in self.nodes):
            raise popart_exception(
                "groupNormStridedChannelGrouping=True is not imitated: a group has channels side by side. Leave it out"
            )
        self.shapes = Shapes(bool(loss))
        for name, info in self.graph.inputs.items():
            self.shapes.add_input(name, shapes.get(name) or info)
        for name, array in self.graph.weights.items():
            self.shapes.add_weight(name, array)
        for node in self.nodes:
            self.shapes.add_node(node)
        read = {name for node in self.nodes for name in node.uses} | set(anchors)
        self.inputs = {name: self.shapes.info(name) for name in self.graph.inputs if name in read}
        self.trained = self._trained() if loss else {}
        if loss and self.shapes.info(loss).nelms() != 1:
            shape = self.shapes.info(loss).shape()
            raise popart_exception(
                f"the loss {loss!r} must be a single number; its shape is {shape}. Losses take "
                "reduction=popart.ReductionType.Sum or Mean"
            )

    def _check_factors(self, training: bool) -> None:
        options = self._options
        for name, switch in (
            ("accumulationFactor", "enableGradientAccumulation"),
            ("replicatedGraphCount", "enableReplicatedGraphs"),
        ):
            number = getattr(options, name)
            if number < 1 or number % 1:
                raise popart_exception(f"{name} must be a whole number of at least 1; received {number}")
            if number > 1 and not getattr(options, switch):
                raise popart_exception(f"{name} is {number}, and {switch} is False: set it to True")
        kind = options.accumulationAndReplicationReductionType
        if kind not in (ReductionType.Sum, ReductionType.Mean):
            raise popart_exception(f"accumulationAndReplicationReductionType is Sum or Mean; received {kind!r}")
        if not training and options.accumulation() > 1:
            raise popart_exception("gradients are accumulated in training only: an InferenceSession cannot have it")

    def check_device(self, device: DeviceInfo) -> None:
        """Raise if nodes are placed on IPUs that the device does not have."""
        manual = self._options.virtualGraphMode is VirtualGraphMode.Manual and device.type is not DeviceType.Cpu
        if manual and self.graph.stages[1] >= device.numIpus:
            raise popart_exception(
                f"a node is put on IPU {self.graph.stages[1]}, counted from 0, and the device has {device.numIpus}"
            )

    def info(self, name: str) -> TensorInfo:
        """Return dtype and shape of a tensor, or of its gradient.

        Raises:
            popart_exception: the tensor is not in this session.
        """
        plain = name.removeprefix(GRADIENT).removeprefix(FINAL_GRADIENT) if self.loss else name
        if plain not in self.shapes:
            raise unknown("a tensor of this session, where only what is needed is left", name, self.graph.tensors())
        return self.shapes.info(plain)

    def _trained(self) -> dict[str, TensorInfo]:
        """Return the floating weights to which the loss's gradients can flow, the last used one first.

        Raises:
            popart_exception: an anchor is the gradient of a tensor without a gradient.
        """
        reached, first_use = {self.loss}, {}
        for place in reversed(range(len(self.nodes))):
            node = self.nodes[place]
            if not reached.intersection(node.outputs) or node.op in _STOPS:
                continue
            shut = (*find(node.domain, node.op).reads, *_STATISTICS.get(node.op, ()))
            closed = {name for position, name in enumerate(node.inputs) if position in shut}
            for name in node.uses:
                if name not in closed and self._is_float(name):
                    reached.add(name)
                    first_use[name] = place
        for name in self.watched:
            if name not in reached:
                raise popart_exception(
                    f"the anchor {GRADIENT + name!r} does not exist: no gradient of the loss {self.loss!r} reaches "
                    f"{name!r}, or it is an integer. Leave the anchor out"
                )
        weights = [name for name in self.graph.weights if name in first_use]
        return {name: self.shapes.info(name) for name in sorted(weights, key=lambda n: -first_use[n])}

    def _is_float(self, name: str) -> bool:
        return self.shapes.info(name).torch_dtype().is_floating_point

    # -- the schedule --------------------------------------------------------------------------------------------

    def schedule(self) -> list[dict[str, Any]]:
        """Return the order of all operations: forward, backward interleaved with stores, loads, updates."""
        entries = [_entry(node.op, node.name, node.inputs, node.outputs) for node in self.nodes]
        if not self.loss:
            return entries
        waiting = dict.fromkeys(self.trained)
        for node in reversed(self.nodes):
            gradients = [GRADIENT + name for name in node.uses if name in self.shapes and self._is_float(name)]
            if not gradients:
                continue
            entries.append(_entry(f"{node.op}Grad", f"{node.name}Grad", [GRADIENT + node.outputs[0]], gradients))
            final = [name for name in waiting if name in node.uses and self._last_use(name, node)]
            for weight in final:
                del waiting[weight]
                entries += self._store(weight)
        for weight in self.trained:
            entries += self._update(weight)
        return entries

    def _last_use(self, weight: str, node: GraphNode) -> bool:
        """Return whether no earlier node uses the weight, so that backward adds nothing more to its gradient."""
        return next(other for other in self.nodes if weight in other.uses) is node

    def _store(self, weight: str) -> list[dict[str, Any]]:
        if not self._options.hostAllReduce:
            return []
        return [_entry("GradCopyToHost", f"{COPY_PREFIX}d2h__{weight}", [gradient_id(weight, self._options)], [])]

    def _update(self, weight: str) -> list[dict[str, Any]]:
        gradient, reduced = gradient_id(weight, self._options), gradient_id(weight, self._options)
        if self._options.hostAllReduce and self._options.hostWeightUpdate:
            name = f"{VAR_COPY_PREFIX}{weight}"
            return [_entry("HostSGD0VarUpdate", name, [gradient, weight], [f"HostReduceOut__{weight}"])]
        entries = []
        if self._options.hostAllReduce:
            reduced = f"HostReduceOut__{gradient}"
            entries = [_entry("GradCopyFromHost", f"{COPY_PREFIX}h2d__{weight}", [gradient], [reduced])]
        return [*entries, _entry("VarUpdate", f"VarUpdate__{weight}", [weight, reduced], [f"Updated___{weight}"])]


def _entry(kind: str, name: str, inputs: Any, outputs: Any) -> dict[str, Any]:
    return {
        "type": kind,
        "name": name,
        "inputs": [{"name": name} for name in inputs if name],
        "outputs": [{"name": name} for name in outputs if name],
    }
