"""Derivatives of the collectives, registered with TensorFlow for graphs and tapes.

Their convention is Horovod's, see docs/torch.md, "Gradients of the operations"; but Min, Max and Product have their
true derivatives, where Horovod reduced the gradients with the same operation. All can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from horovod import context
from horovod.bindings.process_sets import ProcessSet, global_process_set
from horovod.bindings.reductions import Reduction
from horovod.core.requests import Kind, ReduceOp
from horovod.tensorflow import collectives, order
from horovod.tensorflow.requests import OP_TYPES, QUERIES, GraphRequest

__all__ = ["register"]

_LINEAR = (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM)


def _request(op: Any) -> GraphRequest:
    text = op.get_attr("request")
    return GraphRequest.decode(text if isinstance(text, bytes) else text.encode())


def _members(key: int) -> ProcessSet:
    """Return a process set by its id."""
    found = ProcessSet(context.engine().sets.as_dict()[key])
    found.process_set_id = key
    return found


def _name(request: GraphRequest, what: str = "gradient") -> str | None:
    return f"{request.name.rpartition('/')[2]}.{what}" if request.name else None


def _filled(grads: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """Return dense gradients; zeros for outputs without a gradient."""
    return [
        tf.zeros_like(output) if grad is None else tf.convert_to_tensor(grad)
        for grad, output in zip(grads, outputs, strict=True)
    ]


def _of_allreduce(op: Any, *grads: Any) -> list[Any]:
    """Reduce the gradients as the tensors were, and chain with the derivative of the operation."""
    request, filled = _request(op), _filled(grads, op.outputs)
    members = _members(request.process_set)
    if request.op in _LINEAR:
        how = Reduction(request.op, request.prescale, request.postscale, members)
        return collectives.allreduce(filled, how, _name(request))
    total = Reduction(ReduceOp.SUM, process_set=members)
    summed = collectives.allreduce(filled, total, _name(request))
    slopes = _slopes(op.inputs, op.outputs, request, total)
    return [whole * tf.math.conj(slope) for whole, slope in zip(summed, slopes, strict=True)]


def _slopes(inputs: Sequence[Any], outputs: Sequence[Any], request: GraphRequest, total: Reduction) -> list[Any]:
    """d output / d this rank's input, elementwise, for the operations that are not linear."""
    factor = request.prescale * request.postscale
    if request.op in (ReduceOp.MIN, ReduceOp.MAX):
        # The same arithmetic as forward, so that this rank's value compares equal to the output it gave.
        winners = [
            tf.cast(tf.equal(_scale(_apart(_scale(x, request.prescale), y), request.postscale), y), x.dtype)
            for x, y in zip(inputs, outputs, strict=True)
        ]
        ties = collectives.allreduce(winners, total, _name(request, "ties"))
        return [
            _scale(won, factor) / tf.maximum(tied, tf.ones_like(tied)) for won, tied in zip(winners, ties, strict=True)
        ]
    scaled = [_scale(x, request.prescale) for x in inputs]
    zero = [tf.equal(x, tf.zeros_like(x)) for x in scaled]
    counts = [tf.cast(z, x.dtype) for z, x in zip(zero, scaled, strict=True)]
    zeros = collectives.allreduce(counts, total, _name(request, "zeros"))
    nonzero = [tf.where(z, tf.ones_like(x), x) for z, x in zip(zero, scaled, strict=True)]
    products = collectives.allreduce(
        nonzero, Reduction(ReduceOp.PRODUCT, process_set=total.process_set), _name(request, "product")
    )
    return [
        _scale(tf.where(tf.equal(found, own), whole / mine, tf.zeros_like(whole)), factor)
        for found, own, whole, mine in zip(zeros, counts, products, nonzero, strict=True)
    ]


def _scale(tensor: Any, factor: float) -> Any:
    # Use tf.constant: tf.cast() of a Python number would go through float32.
    return tensor if factor == 1.0 else tensor * tf.constant(factor, tensor.dtype)


def _apart(tensor: Any, output: Any) -> Any:
    """Keep optimizers of graphs from joining the factors before and after, which would round differently."""
    return tf.where(tf.equal(output, output), tensor, output)


def _of_allgather(op: Any, *grads: Any) -> list[Any]:
    """Average the gradients and take this rank's rows."""
    request, filled = _request(op), _filled(grads, op.outputs)
    members = _members(request.process_set)
    own = [tf.shape(tensor)[0] if tensor.shape.rank != 0 else 1 for tensor in op.inputs]
    place = collectives.place_of(members)
    # Ranks that have joined are not in it.
    (table,) = collectives.allgather([tf.stack([[place, *own]])], members, _name(request, "rows"))
    places, rows = table[:, :1], table[:, 1:]
    before = tf.reduce_sum(tf.where(places < place, rows, 0), axis=0)
    complete = tf.debugging.assert_equal(
        tf.reduce_sum(rows, axis=0), tf.stack([tf.shape(grad)[0] for grad in filled]),
        "the gradient of an allgather has rows of a rank that has called join since; that rank must compute the "
        "gradient, too, before it joins",
    )  # fmt: skip
    with tf.control_dependencies([complete]):
        reduced = collectives.allreduce(filled, Reduction(process_set=members), _name(request))
    return [tf.reshape(grad[before[i] : before[i] + own[i]], tf.shape(op.inputs[i])) for i, grad in enumerate(reduced)]


def _of_broadcast(op: Any, grad: Any) -> Any:
    """Average the gradients for the root; return zeros on other ranks, whose inputs had no effect."""
    request = _request(op)
    members = _members(request.process_set)
    (reduced,) = collectives.allreduce(
        _filled([grad], op.outputs), Reduction(process_set=members), _name(request)
    )  # fmt: skip
    with tf.control_dependencies([reduced]):
        zeros = tf.zeros_like(op.inputs[0])
    # A choice keeps the allreduce in the derivative on all ranks, so that all take part in a second one.
    return tf.where(collectives.place_of(global_process_set) == request.root, reduced, zeros)


def _of_alltoall(op: Any, grad: Any, _: Any) -> list[Any]:
    """Send every row's gradient back to the rank that sent the row."""
    request = _request(op)
    filled = _filled([grad], op.outputs[:1])[0]
    back, _ = collectives.alltoall(filled, op.outputs[1], _members(request.process_set), _name(request))
    return [tf.reshape(back, tf.shape(op.inputs[0])), None]


def _of_reducescatter(op: Any, *grads: Any) -> list[Any]:
    """Gather every rank's gradient of its rows."""
    request = _request(op)
    if request.op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise NotImplementedError(
            f"reducescatter is differentiable for Sum and Average only. Received: {request.op.name.capitalize()}"
        )
    members = _members(request.process_set)
    factor = request.prescale * request.postscale
    scaled = [_scale(grad, factor) for grad in _filled(grads, op.outputs)]
    if request.op is ReduceOp.SUM:
        count = collectives.members_of(members)
        scaled = [grad * tf.cast(count, grad.dtype) for grad in scaled]
    gathered = collectives.allgather(scaled, members, _name(request))
    return [tf.reshape(grad, tf.shape(tensor)) for grad, tensor in zip(gathered, op.inputs, strict=True)]


def _without_token(derivative: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Return a derivative for nodes whose inputs end with a token for their name, after the tensors."""

    def derive(op: Any, *grads: Any) -> list[Any]:
        tensors = [tensor for tensor in op.inputs if tensor.dtype != tf.resource]
        node = SimpleNamespace(inputs=tensors, outputs=op.outputs, get_attr=op.get_attr)
        with order.derivative_of(getattr(op, "graph", None)):
            found = derivative(node, *grads)
        listed = list(found) if isinstance(found, list | tuple) else [found]
        return listed + [None] * (len(op.inputs) - len(tensors))

    return derive


def register() -> None:
    """Register the derivatives with TensorFlow; call it once per process."""
    derivatives = {
        Kind.ALLREDUCE: _of_allreduce,
        Kind.ALLGATHER: _of_allgather,
        Kind.BROADCAST: _of_broadcast,
        Kind.ALLTOALL: _of_alltoall,
        Kind.REDUCESCATTER: _of_reducescatter,
    }
    for op_type, kind in OP_TYPES.items():
        if kind in derivatives:
            tf.RegisterGradient(op_type)(_without_token(derivatives[kind]))
        else:
            tf.no_gradient(op_type)
    for op_type in QUERIES:
        tf.no_gradient(op_type)
