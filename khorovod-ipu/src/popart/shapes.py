"""Inference of shapes and dtypes: the kernels run on torch's ``meta`` tensors, which have no values.

Inputs that determine shapes (the second input of a reshape) must be known: they are constants, integer weights, or
results computed from these and from shapes.
"""

from __future__ import annotations

import numpy as np
import torch

from popart.errors import popart_exception
from popart.kernels import FIXED, GraphNode, GraphRun, find
from popart.tensors import Array, TensorInfo, from_torch

__all__ = ["Shapes"]

#: Weights of at most this many elements keep their values here: they may be a shape, an axis or a limit.
_SMALL = 64


class Shapes:
    """Dtypes and shapes of the tensors of a graph, which grows node by node.

    Args:
        training: whether normalization has the outputs that it has in training.
    """

    def __init__(self, training: bool = False) -> None:
        self._run = GraphRun(training=training)

    def __contains__(self, name: str) -> bool:
        return name in self._run.values

    def info(self, name: str) -> TensorInfo:
        """Return dtype and shape of a tensor.

        Raises:
            KeyError: the tensor is unknown.
        """
        return from_torch(self._run.values[name])

    def add_input(self, name: str, info: TensorInfo) -> None:
        """Record an input."""
        self._run.values[name] = torch.empty(info.shape(), dtype=info.torch_dtype(), device="meta")

    def add_weight(self, name: str, array: Array) -> None:
        """Record a weight or a constant."""
        if array.size > _SMALL:
            self.add_input(name, TensorInfo(array))
        else:
            self._run.values[name] = torch.from_numpy(np.array(array))

    def add_node(self, node: GraphNode) -> None:
        """Infer and record the outputs of a node.

        Raises:
            popart_exception: the node does not fit its inputs, or the software device does not have its operator.
        """
        run, values = self._run, self._run.values
        inputs = [values[name] if name else None for name in node.inputs]
        operator = find(node.domain, node.op)
        for name, value in node.attributes.items():
            if value not in FIXED.get(f"{node.op}.{name}", (value,)):
                raise popart_exception(
                    f"{node.op} {node.name!r}: the software device does not imitate {name}={value!r}"
                )
        free = [place for place, value in enumerate(inputs) if place not in operator.reads and value is not None]
        if any(inputs[place].is_meta for place in free):  # type: ignore[union-attr]
            for place in free:
                inputs[place] = inputs[place].to("meta")  # type: ignore[union-attr]
        for place in operator.reads:
            if place < len(inputs) and (value := inputs[place]) is not None and value.is_meta:
                raise popart_exception(
                    f"{node.op} {node.name!r} takes its shape from {node.inputs[place]!r}, which depends on data: "
                    "the device needs shapes that are known before it runs. Use a constant"
                )
        try:
            with torch.no_grad():
                found = operator.kernel(run, node, inputs)
        except popart_exception:
            raise
        except Exception as error:
            raise popart_exception(
                misfit(node, [None if v is None else from_torch(v) for v in inputs], error)
            ) from error
        given = (found,) if isinstance(found, torch.Tensor) else found
        values.update({name: value for name, value in zip(node.outputs, given, strict=False) if name})


def misfit(node: GraphNode, infos: list[TensorInfo | None], error: Exception) -> str:
    """Return the error message for a node that cannot be computed from its inputs."""
    received = ", ".join(
        f"{name}: {info.data_type()} {info.shape()}" for name, info in zip(node.inputs, infos, strict=True) if info
    )
    attributes = ", ".join(f"{key}={value!r}" for key, value in node.attributes.items() if _is_shown(value))
    with_what = f" with {attributes}" if attributes else ""
    reason = str(error).partition("\n")[0] or type(error).__name__
    return f"{node.op} {node.name!r}{with_what} does not fit its inputs ({received}): {reason}"


def _is_shown(value: object) -> bool:
    return not hasattr(value, "shape")
