"""Annotations of nodes in a ``Builder``: scopes, places, priorities, attributes.

None of them changes a result, so all are accepted. Methods that take the outputs of a node raise
``popart_exception`` if no node has these outputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import onnx
from onnx import helper

from popart.errors import popart_exception, unknown
from popart.model import attribute_value

__all__ = ["Annotations"]

_IPU, _STAGE, _PHASE = "__ipu_number", "__pipeline_stage", "__execution_phase"
_RECOMPUTE = "__recompute_output"


def _placing(attribute: str, what: str, kind: type = int) -> Any:
    """Return a method that sets an attribute of the nodes made in a block, or of one node."""

    def place(self: Annotations, *where: Any) -> Any:
        if len(where) not in (1, 2):
            raise popart_exception(f"expected a number, or a node's outputs and a number. Received: {where!r}")
        number = kind(getattr(where[-1], "value", where[-1]))
        if len(where) == 2:
            return self.addNodeAttribute(attribute, number, where[0])
        return self._inside(attribute, number)

    place.__doc__ = f"{what}: those made in a ``with`` block, ``(1)``, or one node, ``(ids, 1)``."
    return place


def _placed(attribute: str, method: str) -> Any:
    """Return a method that reads the attribute that ``method`` has set."""

    def get(self: Annotations, nodeOutputNames: Any = None) -> int:
        if nodeOutputNames is not None:
            return int(self.getNodeAttribute(attribute, nodeOutputNames))
        if attribute not in dict(self._placement):
            raise popart_exception(f"nothing is set here. Call this inside of `with builder.{method}(...)`")
        return int(dict(self._placement)[attribute])

    get.__doc__ = f"Return what ``{method}`` has set in this block, or for the node that gives these outputs."
    return get


def _has(attribute: str) -> Any:
    """Return a method that returns whether a block has set an attribute."""
    return lambda self: attribute in dict(self._placement)


def _hint(attribute: str, what: str) -> Any:
    """Return a method that stores its argument as an attribute of the node, without other effect."""

    def hint(self: Annotations, nodeOutputNames: Any, *values: Any, **named: Any) -> None:
        words = [str(value) for value in (*values, *named.values())]
        self.addNodeAttribute(attribute, words or ["1"], nodeOutputNames)

    hint.__doc__ = f"{what}; without effect."
    return hint


class Annotations:
    """Methods of ``Builder`` that annotate nodes."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._graph = graph
        self._scopes: list[str] = []
        self._placement: list[tuple[str, Any]] = []

    # -- attributes of a node ------------------------------------------------------------------------------------

    def addNodeAttribute(self, attributeName: str, attributeValue: Any, nodeOutputNames: Any) -> None:
        """Add an attribute to the node with these outputs."""
        node = self._node_of(nodeOutputNames)
        _drop(node, attributeName)
        node.attribute.append(helper.make_attribute(attributeName, attributeValue))

    def getNodeAttribute(self, attributeName: str, nodeOutputNames: Any) -> Any:
        """Return an attribute of the node with these outputs; methods with a type in their name do the same.

        Raises:
            popart_exception: the node has no attribute of this name.
        """
        found = {attribute.name: attribute for attribute in self._node_of(nodeOutputNames).attribute}
        if attributeName not in found:
            raise unknown("an attribute of this node", attributeName, found)
        return attribute_value(found[attributeName])

    getInt64NodeAttribute = getInt64VectorNodeAttribute = getNodeAttribute
    getFloatNodeAttribute = getFloatVectorNodeAttribute = getNodeAttribute
    getStringNodeAttribute = getStringVectorNodeAttribute = getBoolNodeAttribute = getNodeAttribute

    def nodeHasAttribute(self, attributeName: str, nodeOutputNames: Any) -> bool:
        """Return whether the node with these outputs has an attribute."""
        return attributeName in self.getAllNodeAttributeNames(nodeOutputNames)

    def removeNodeAttribute(self, attributeName: str, nodeOutputNames: Any) -> None:
        """Remove an attribute from the node with these outputs.

        Raises:
            popart_exception: the node has no attribute of this name.
        """
        self.getNodeAttribute(attributeName, nodeOutputNames)
        _drop(self._node_of(nodeOutputNames), attributeName)

    def getAllNodeAttributeNames(self, nodeOutputNames: Any) -> list[str]:
        """Return the names of the attributes of the node with these outputs."""
        return [attribute.name for attribute in self._node_of(nodeOutputNames).attribute]

    # -- scopes --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def nameScope(self, name: str) -> Iterator[None]:
        """Return a context that prefixes new ids with ``name/``."""
        self._scopes.append(f"{name}/")
        try:
            yield
        finally:
            self._scopes.pop()

    def getNameScope(self, name: str = "") -> str:
        """Return ``name`` prefixed with all scopes."""
        return "".join(self._scopes) + name

    def outlineAttributes(self, attributes: Mapping[str, str]) -> contextlib.AbstractContextManager[None]:
        """Mark a block whose equal parts stay separate; without effect, because nothing is outlined.

        Args:
            attributes: names and values, which are only compared for equality.
        """
        flat = [str(item) for pair in dict(attributes).items() for item in pair]
        return self._inside("__outline_attribute", flat)

    def outputTensorLocation(self, location: Any) -> contextlib.AbstractContextManager[None]:
        """Choose the memory of tensors made in a block; without effect, because there is only one memory.

        Args:
            location: a ``popart.TensorLocation``, or an argument for its constructor.
        """
        return contextlib.nullcontext()

    virtualGraph = _placing(_IPU, "Put nodes on an IPU")
    pipelineStage = _placing(_STAGE, "Put nodes into a stage of the pipeline")
    executionPhase = _placing(_PHASE, "Put nodes into a phase")
    recomputeOutput = _placing(_RECOMPUTE, "Mark nodes that are computed again, without effect")
    schedulePriority = _placing("__schedule_priority", "Mark nodes that are computed early, without effect", float)
    getVirtualGraph = _placed(_IPU, "virtualGraph")
    getPipelineStage = _placed(_STAGE, "pipelineStage")
    getExecutionPhase = _placed(_PHASE, "executionPhase")
    hasVirtualGraph, hasPipelineStage, hasExecutionPhase = _has(_IPU), _has(_STAGE), _has(_PHASE)

    # -- hints about a made node ---------------------------------------------------------------------------------

    recomputeOutputInBackwardPass = _hint(_RECOMPUTE, "Mark outputs that are computed again in backward")
    setAvailableMemoryProportion = _hint("__available_memory_proportion", "Limit the share of a tile's memory")
    setPartialsType = _hint("__partials_type", "Choose the dtype in which the terms of a product are added")
    setSerializeMatMul = _hint("__serialize_matmul", "Compute a product in parts to save memory")
    excludePatterns = _hint("__exclude_patterns", "Exclude a node from rewritings of the graph")

    # -- inside --------------------------------------------------------------------------------------------------

    def _node_of(self, outputs: Any) -> Any:
        names = {outputs} if isinstance(outputs, str) else set(outputs)
        for node in self._graph.node:
            if names & set(node.output):
                return node
        raise popart_exception(f"no node gives {sorted(names)}")

    @contextlib.contextmanager
    def _inside(self, attribute: str, value: Any) -> Iterator[None]:
        self._placement.append((attribute, value))
        try:
            yield
        finally:
            self._placement.pop()


def _drop(node: Any, name: str) -> None:
    for old in [attribute for attribute in node.attribute if attribute.name == name]:
        node.attribute.remove(old)
