"""``Builder``: builds a graph, call by call, as a real ONNX model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from khorovod_ipu.names import nearest
from popart.annotations import Annotations
from popart.errors import popart_exception, unknown
from popart.kernels import GraphNode, known_operators
from popart.model import OPSETS, check_opset, load_proto, read_graph
from popart.opsets import AiGraphcore, AiOnnx
from popart.shapes import Shapes
from popart.tensors import Array, TensorInfo
from popart.updates import STATE

__all__ = ["Builder", "DebugContext"]

_DEFAULT_OPSET = 10
#: IR version of the time of that operator set; current readers accept it.
_IR_VERSION = 5
#: Methods that the software device lacks, and their replacements.
_INSTEAD = {
    "createSubgraphBuilder": ": no graphs inside of graphs; build the operations of a loop one after the other",
    "saveInitializersExternally": ": weights are in the model's file, saveModelProto() writes it",
    "embedReplicationFactor": ": SessionOptions.replicatedGraphCount says how many replicas there are",
}


class DebugContext:
    """A name for operations; the same as passing the name itself.

    Args:
        name: put in front of ids.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name

    def __str__(self) -> str:
        return self.name


class Builder(Annotations):
    """Builds a model. Methods that take the id of a tensor raise ``popart_exception`` if the tensor does not exist.

    Args:
        modelProtoOrFilename: a model to extend: its bytes, or a file's name.
        opsets: versions by domain, ``{"ai.onnx": 10}``.
        builderCore: accepted for compatibility with PopART; must be None.

    Attributes:
        aiOnnx: operators of ONNX, of version 10 unless ``opsets`` says otherwise; also ``aiOnnxOpset6`` to ``11``.
        aiGraphcore: operators of ``ai.graphcore``.

    Raises:
        popart_exception: the argument is not a model, or has another version of the operators.
    """

    def __init__(
        self, modelProtoOrFilename: Any = None, opsets: dict[str, int] | None = None, builderCore: None = None
    ) -> None:
        self._opset = check_opset((opsets or {}).get("ai.onnx", _DEFAULT_OPSET))
        self._opset_used = 0
        self._counts: Counter[str] = Counter()
        super().__init__(onnx.GraphProto(name="BuilderGraph"))
        self._shapes = Shapes(training=True)
        self._weights: dict[str, Array] = {}
        if modelProtoOrFilename is not None:
            self._go_on_with(load_proto(modelProtoOrFilename))
        self.aiOnnx = AiOnnx(self, self._opset)
        self.aiGraphcore = AiGraphcore(self)
        self.aiGraphcoreOpset1 = self.aiGraphcore

    def __getattr__(self, name: str) -> Any:
        version = name.removeprefix("aiOnnxOpset")
        if name.startswith("aiOnnxOpset") and version.isdigit() and int(version) in OPSETS:
            return AiOnnx(self, int(version))
        raise AttributeError(
            f"popart.Builder has no {name!r} on the software device{nearest(name, dir(type(self)))}"
            f"{_INSTEAD.get(name, '')}; see docs/popart.md"
        )

    # -- inputs and weights --------------------------------------------------------------------------------------

    def addInputTensor(self, info: Any, *more: Any, debugContext: Any = "", debugPrefix: Any = "") -> str:
        """Declare an input and return its id.

        Args:
            info: a ``TensorInfo``; or a dtype's name, with the shape after it.
            more: the shape after a dtype; settings, which are accepted; a name.
            debugContext: the name; ``input``, ``input/1`` and so on without one.
            debugPrefix: older name of ``debugContext``.
        """
        rest = list(more)
        if not isinstance(info, TensorInfo):
            info = TensorInfo(info, rest.pop(0) if rest else None)
        label = [str(item) for item in rest if isinstance(item, str | DebugContext)]
        name = self._unique("", str(debugContext or debugPrefix or (label[0] if label else "")) or "input")
        self._graph.input.append(helper.make_tensor_value_info(name, info.onnx_dtype(), info.shape()))
        self._shapes.add_input(name, info)
        return name

    # -- weights and outputs -------------------------------------------------------------------------------------

    def addInitializedInputTensor(self, initVal: Any, debugContext: Any = "", debugPrefix: Any = "") -> str:
        """Declare a trainable weight with its initial value, and return its id.

        Args:
            initVal: the initial value, an array; it is copied.
            debugContext: the name; ``init_input``, ``init_input/1`` and so on without one.
            debugPrefix: older name of ``debugContext``.
        """
        array = np.array(initVal, order="C")
        TensorInfo(array)  # refuses dtypes that the device lacks
        name = self._unique("", str(debugContext or debugPrefix) or "init_input")
        self._graph.initializer.append(numpy_helper.from_array(array, name))
        self._weights[name] = array
        self._shapes.add_weight(name, array)
        return name

    def addOutputTensor(self, outputTensorId: str) -> None:
        """Make a tensor an output of the model."""
        info = self._info(outputTensorId)
        if outputTensorId not in self.getOutputTensorIds():
            value = helper.make_tensor_value_info(outputTensorId, info.onnx_dtype(), info.shape())
            self._graph.output.append(value)

    # -- operators -----------------------------------------------------------------------------------------------

    def add_node(
        self, op: str, domain: str, version: int, inputs: Sequence[str], outputs: int, attributes: dict[str, Any],
        label: str,
    ) -> list[str]:  # fmt: skip
        """Add an operation; ``aiOnnx`` and ``aiGraphcore`` call this.

        Args:
            op: type of the operator.
            domain: empty for ONNX's own.
            version: version of ONNX's operator set; a model has only one.
            inputs: ids; empty for omitted inputs.
            outputs: number of outputs.
            attributes: attributes by name; ``None`` is omitted.
            label: prefix of the outputs' ids.

        Returns:
            The ids of the outputs.

        Raises:
            popart_exception: an input does not exist, the operator does not fit its inputs, or another version of
                the operator set was used before.
        """
        if domain == "":
            self._use_opset(version)
        for name in inputs:
            if name and name not in self._shapes:
                raise unknown(f"a tensor of this builder, as {op} needs it", name, self.getValueTensorIds())
        placed = dict(self._placement)
        given = {name: value for name, value in attributes.items() if value is not None}
        base = "".join(self._scopes) + (f"{label}/" if label else "")
        names = [self._unique(base, f"{op}:{index}") for index in range(outputs)]
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
        self._shapes.add_node(GraphNode(op, domain, names[0], tuple(inputs), tuple(names), _arrays(plain)))
        # PopART's own graphs name nodes by their first output, too.
        proto = helper.make_node(op, inputs, names, name=names[0], domain=domain or None)
        # An empty list has no type: for ONNX's operators it is a list of integers.
        proto.attribute.extend(
            helper.make_attribute(key, value, attr_type=onnx.AttributeProto.INTS if value == [] else None)
            for key, value in {**plain, **placed}.items()
        )
        self._graph.node.append(proto)
        return names

    def checkpointOutput(self, nodeOutputNames: Sequence[str]) -> list[str]:
        """Mark tensors to be kept instead of recomputed, and return the ids to use from now on.

        Args:
            nodeOutputNames: ids, in a list.
        """
        return [self.aiGraphcore.nop([name]) for name in nodeOutputNames]

    def customOp(
        self, opName: str, opVersion: int, domain: str, inputs: Sequence[str], attributes: dict[str, Any] | None = None,
        numOutputs: int = 1, name: str = "",
    ) -> list[str]:  # fmt: skip
        """Add an operation by its operator's name; the software device has the operators of ONNX and ``ai.graphcore``.

        Args:
            opName: the operator.
            opVersion: accepted.
            domain: empty or ``ai.onnx`` for ONNX's own.
            inputs: ids.
            attributes: by name.
            numOutputs: number of outputs.
            name: prefix of the outputs' ids.

        Returns:
            The ids of the outputs.

        Raises:
            popart_exception: the operator is C++ code for the hardware, or does not fit its inputs.
        """
        where = "" if domain == "ai.onnx" else domain
        if opName not in known_operators(where):
            raise popart_exception(
                f"the software device has no operator {domain}.{opName}: custom operators are compiled for the "
                "hardware. Use the operators of dir(builder.aiOnnx) and dir(builder.aiGraphcore)"
            )
        version = self._opset_used or self._opset
        return self.add_node(opName, where, version, list(inputs), int(numOutputs), dict(attributes or {}), name)

    def reshape_const(self, aiOnnx: Any, args: Sequence[str], shape: Sequence[int], debugContext: Any = "") -> str:
        """Add a reshape to a known shape, and return the id of its output.

        Args:
            aiOnnx: the operators of this builder.
            args: id of the tensor, in a list.
            shape: the dimensions.
            debugContext: prefix of the ids.
        """
        target = aiOnnx.constant(np.array(shape, np.int64), debugContext=debugContext)
        return str(aiOnnx.reshape([*args, target], debugContext=debugContext))

    # -- what there is -------------------------------------------------------------------------------------------

    def getInputTensorIds(self) -> list[str]:
        """Return the ids of inputs and weights."""
        return [*(value.name for value in self._graph.input), *self._weights]

    def getOutputTensorIds(self) -> list[str]:
        """Return the ids of the outputs that ``addOutputTensor`` declared."""
        return [value.name for value in self._graph.output]

    def getTrainableTensorIds(self) -> list[str]:
        """Return the ids of all weights."""
        return list(self._weights)

    def getValueTensorIds(self) -> list[str]:
        """Return the ids of all tensors."""
        return [*self.getInputTensorIds(), *(name for node in self._graph.node for name in node.output)]

    def isInitializer(self, tensorId: str) -> bool:
        """Return whether a tensor is a weight."""
        return tensorId in self._weights

    def getTensorShape(self, tensorId: str) -> list[int]:
        """Return the dimensions of a tensor."""
        return self._info(tensorId).shape()

    def getTensorDtypeString(self, tensorId: str) -> str:
        """Return a tensor's dtype, as in ``float32``."""
        return self._info(tensorId).data_type_lcase()

    def getModelProto(self) -> bytes:
        """Return the model, serialized."""
        versions = [helper.make_opsetid("", self._opset_used or self._opset), helper.make_opsetid("ai.graphcore", 1)]
        model = helper.make_model(self._graph, opset_imports=versions, producer_name="khorovod-ipu")
        model.ir_version = _IR_VERSION
        return bytes(model.SerializeToString())

    def setGraphName(self, name: str) -> None:
        """Set the name of the graph."""
        self._graph.name = name

    def saveModelProto(self, filename: str) -> None:
        """Write the model into a file."""
        Path(filename).write_bytes(self.getModelProto())

    # -- inside --------------------------------------------------------------------------------------------------

    def _go_on_with(self, model: onnx.ModelProto) -> None:
        self._graph.CopyFrom(model.graph)
        for opset in model.opset_import:
            if opset.domain in ("", "ai.onnx"):
                self._opset = self._opset_used = opset.version
        found = read_graph(model)
        self._weights = {name: array for name, array in found.weights.items() if not name.startswith(STATE)}
        for name, info in found.inputs.items():
            self._shapes.add_input(name, info)
        for name, array in found.weights.items():
            self._shapes.add_weight(name, array)
        for node in found.nodes:
            self._shapes.add_node(node)
        self._counts.update(self.getValueTensorIds())

    def _info(self, name: str) -> TensorInfo:
        if name not in self._shapes:
            raise unknown("a tensor of this builder", name, self.getValueTensorIds())
        return self._shapes.info(name)

    def _unique(self, scope: str, name: str) -> str:
        full = ("".join(self._scopes) if not scope else "") + scope + name
        taken = self._counts[full]
        self._counts[full] += 1
        return f"{full}/{taken}" if taken else full

    def _use_opset(self, version: int) -> None:
        if self._opset_used not in (0, version):
            raise popart_exception(
                f"a model has one version of ONNX's operators. This one uses {self._opset_used}; received "
                f"aiOnnxOpset{version}"
            )
        self._opset_used = version


def _arrays(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return attributes in a session's format: tensors as arrays."""
    return {
        name: numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value
        for name, value in attributes.items()
    }
