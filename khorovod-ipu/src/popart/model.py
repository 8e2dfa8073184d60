"""An ONNX model for the sessions: read, checked, and reduced to the needed nodes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
from onnx import numpy_helper

from popart.errors import popart_exception, unknown
from popart.kernels import GraphNode
from popart.tensors import Array, TensorInfo, torch_type

__all__ = ["OPSETS", "Graph", "attribute_value", "check_opset", "load_proto", "read_graph"]

#: Versions of ONNX's operators that the kernels implement; later versions change the meaning of some operators.
OPSETS = range(6, 12)

#: Attributes for place and time of a node's execution; they do not change its results.
PLACEMENT = (
    "__ipu_number", "__pipeline_stage", "__execution_phase", "__recompute_output", "__recompute_checkpoint",
    "__schedule_priority", "__debug_context_id", "__outline_attribute", "__available_memory_proportion",
    "__partials_type", "__serialize_matmul", "__exclude_patterns",
)  # fmt: skip


@dataclass
class Graph:
    """The contents of a model.

    Attributes:
        nodes: in the order of the model, which is computable.
        inputs: inputs from the host, by id.
        weights: initial values, by id.
        stages: highest pipeline stage and highest IPU number of a node.
    """

    nodes: list[GraphNode]
    inputs: dict[str, TensorInfo]
    weights: dict[str, Array]
    stages: tuple[int, int]

    def tensors(self) -> set[str]:
        """Return the ids of all tensors in the graph."""
        computed = {name for node in self.nodes for name in node.outputs}
        return (computed | self.inputs.keys() | self.weights.keys()) - {""}

    def needed_for(self, targets: Iterable[str]) -> list[GraphNode]:
        """Return only the nodes on which the targets depend.

        Raises:
            popart_exception: a target, or an input of a node, does not exist.
        """
        there, wanted = self.tensors(), set(targets)
        for target in wanted - there:
            raise unknown("a tensor of the graph", target, there)
        chosen = []
        for node in reversed(self.nodes):
            if wanted.intersection(node.outputs):
                chosen.append(node)
                wanted.update(node.uses)
        for missing in wanted - there:
            raise popart_exception(f"the model is incomplete: no node gives the tensor {missing!r}")
        return chosen[::-1]


def load_proto(model: Any) -> onnx.ModelProto:
    """Return a model from its bytes or a file's name, or an unchanged ``ModelProto``.

    Raises:
        popart_exception: the argument is not a model.
    """
    if isinstance(model, onnx.ModelProto):
        return model
    try:
        if isinstance(model, bytes | bytearray):
            return onnx.load_model_from_string(bytes(model))
        if isinstance(model, str | os.PathLike):
            return onnx.load_model_from_string(Path(model).read_bytes())
    except OSError as error:
        raise popart_exception(f"the file of the model cannot be read: {error}") from error
    except Exception as error:
        raise popart_exception(f"the argument is not an ONNX model: {error}") from error
    raise popart_exception(f"a model is bytes of getModelProto(), or a file's name; received {type(model).__name__}")


def attribute_value(attribute: onnx.AttributeProto) -> Any:
    """Return an attribute as a plain Python value or as an array.

    Raises:
        popart_exception: it is a graph inside of the graph.
    """
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, onnx.GraphProto):
        raise popart_exception(
            f"the attribute {attribute.name!r} is a graph: the software device has no graphs inside of graphs, such as "
            "loops and conditions. Build the operations one after the other, in a loop of Python"
        )
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    if attribute.type == onnx.AttributeProto.STRINGS:
        return [text.decode() for text in value]
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else value


def check_opset(version: int) -> int:
    """Return a version of ONNX's operators if it is supported.

    Raises:
        popart_exception: the software device does not implement this version.
    """
    if version not in OPSETS:
        raise popart_exception(
            f"models have version {OPSETS[0]} to {OPSETS[-1]} of ONNX's operators, as for PopART; received {version}. "
            "onnx.version_converter.convert_version(model, 11) may help"
        )
    return version


def read_graph(model: Any) -> Graph:
    """Read a model.

    Raises:
        popart_exception: the argument is not a model, has inputs of unknown shape, or another version of the operators.
    """
    proto = load_proto(model)
    graph = proto.graph
    for opset in proto.opset_import:
        if opset.domain in ("", "ai.onnx"):
            check_opset(opset.version)
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    nodes, stages = _nodes(graph)
    inputs = {value.name: _info(value) for value in graph.input if value.name not in weights}
    return Graph(_fuse(nodes), inputs, weights, stages)


def _nodes(graph: onnx.GraphProto) -> tuple[list[GraphNode], tuple[int, int]]:
    """Return the nodes of a graph, and the highest pipeline stage and number of an IPU among them."""
    nodes, stage, ipu = [], 0, 0
    for number, found in enumerate(graph.node):
        values = {attribute.name: attribute_value(attribute) for attribute in found.attribute}
        stage, ipu = max(stage, values.get("__pipeline_stage", 0)), max(ipu, values.get("__ipu_number", 0))
        kept = {name: value for name, value in values.items() if name not in PLACEMENT}
        domain = "" if found.domain == "ai.onnx" else found.domain
        name = found.name or (found.output[0] if found.output else f"{found.op_type} {number}")
        nodes.append(GraphNode(found.op_type, domain, name, tuple(found.input), tuple(found.output), kept))
    return nodes, (stage, ipu)


def _info(value: onnx.ValueInfoProto) -> TensorInfo:
    tensor = value.type.tensor_type
    if any(not dim.HasField("dim_value") for dim in tensor.shape.dim):
        raise popart_exception(f"the input {value.name!r} has a dimension without a number; all shapes must be known")
    return TensorInfo(torch_type(tensor.elem_type), [dim.dim_value for dim in tensor.shape.dim])


def _fuse(nodes: list[GraphNode]) -> list[GraphNode]:
    """Fuse a softmax with the loss after it for differentiation, like PopART's patterns; values are unchanged."""
    softmax = {node.outputs[0]: node for node in nodes if (node.domain, node.op) == ("", "Softmax")}
    return [
        replace(node, logits=softmax[node.inputs[0]].inputs[0], axis=softmax[node.inputs[0]].attributes.get("axis", 1))
        if node.op == "Nll" and node.inputs[0] in softmax and not node.attributes.get("inputIsLogProbability")
        else node
        for node in nodes
    ]
