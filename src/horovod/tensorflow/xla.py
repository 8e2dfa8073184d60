"""Collectives in functions compiled by XLA (``jit_compile=True``), as custom calls of TensorFlow's XLA.

XLA needs fixed shapes, so operations whose results depend on other ranks' shapes cannot be compiled. The calls run
one after the other, in the order of the compiled program, and each blocks its thread.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.ops import control_flow_util

from horovod import context
from horovod.bindings.failures import remember
from horovod.bindings.numpy_adapter import NumpyAdapter
from horovod.core.requests import Kind
from horovod.errors import RequestError
from horovod.tensorflow import order
from horovod.tensorflow.adapter import DTYPES
from horovod.tensorflow.kernels import Node, answer, over
from horovod.tensorflow.library import immortal
from horovod.tensorflow.requests import OP_TYPES, QUERIES, GraphRequest
from horovod.tensorflow.unsafe import HANDLER, add_custom_call, fail_custom_call

__all__ = ["compiled", "is_compiling", "used"]

_P = ctypes.c_void_p
_TARGET = "horovod_collective"
#: Non-empty once an XLA program holds a collective.
used: set[str] = set()
_FIXED = (Kind.ALLREDUCE, Kind.BROADCAST, Kind.REDUCESCATTER)
Array = np.ndarray[Any, np.dtype[Any]]


class _Call(msgspec.Struct, frozen=True):
    """One collective of a compiled program."""

    op_type: str  # Horovod's name of the operation
    request: GraphRequest  # settings of the collective
    dtypes: tuple[str, ...]  # dtypes of the inputs, which are also those of the outputs
    inputs: tuple[tuple[int, ...], ...]  # shapes of the inputs
    outputs: tuple[tuple[int, ...], ...]  # shapes of the outputs


class _Outputs:
    """Allocator that returns the result memory that XLA has allocated."""

    kernels = NumpyAdapter.kernels
    address = NumpyAdapter.address

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._arrays = iter(arrays)

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Array:
        return next(self._arrays)


def is_compiling() -> bool:
    """Return whether XLA will compile the graph under construction."""
    return not tf.executing_eagerly() and bool(
        control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())
    )


def compiled(op_type: str, tensors: Sequence[Any], request: GraphRequest) -> list[Any]:
    """Add a collective to an XLA program; differentiable.

    Raises:
        NotImplementedError: the operation cannot be compiled, or this TensorFlow lacks the XLA functions.
    """
    if op_type in QUERIES:
        return [_asked(op_type, request.process_set)]
    kind = OP_TYPES.get(op_type)
    if kind not in _FIXED or not all(tensor.shape.is_fully_defined() for tensor in tensors):
        what = "is found out while the program runs" if kind not in _FIXED else "is not known yet"
        raise NotImplementedError(
            f"{op_type} cannot be part of a function with jit_compile=True (at {request.site.file}:"
            f"{request.site.line}): XLA must know all shapes, and one here {what}. Call it outside of that function, "
            "or leave jit_compile out; allreduce, broadcast and reducescatter of tensors of known shape can be compiled"
        )
    target = _register()
    used.add(target)
    inputs = tuple(tuple(tensor.shape.as_list()) for tensor in tensors)
    outputs = tuple(_result_shape(kind, shape, request) for shape in inputs)
    dtypes = tuple(tensor.dtype.name for tensor in tensors)
    token = order.token("")
    text = msgspec.json.encode(_Call(op_type, request, dtypes, inputs, outputs)).decode()

    @tf.custom_gradient
    def call(*operands: Any) -> Any:
        from tensorflow.compiler.tf2xla.ops import gen_xla_ops

        made = gen_xla_ops.xla_custom_call_v2(
            operands=operands, call_target_name=target, backend_config=text, has_side_effect=True,
            result_dtypes=[tensor.dtype for tensor in operands], result_shapes=[*outputs, ()],
        )  # fmt: skip
        node = SimpleNamespace(
            inputs=operands[:-1], outputs=made[:-1], graph=operands[0].graph, get_attr=lambda _: request.encode()
        )
        return made, lambda *grads: [*ops.gradient_registry.lookup(op_type)(node, *grads[:-1]), None]

    # Each call takes the number that the previous call returns: XLA keeps only data dependencies in order.
    number = tf.constant(0.0) if token is None else tf.raw_ops.ReadVariableOp(resource=token, dtype=tf.float32)
    found: list[Any] = call(*tensors, number)
    *made, after = found
    if token is not None:
        tf.raw_ops.AssignVariableOp(resource=token, value=after)
    return made


def _asked(op_type: str, process_set: int) -> Any:
    """Return the answer to a query; in an elastic job that of each call, for which XLA compiles shapes anew."""
    graph: Any = tf.compat.v1.get_default_graph()
    if not context.is_elastic() or not hasattr(graph, "capture_call_time_value"):
        return tf.constant(answer(op_type, process_set), tf.int32)
    while graph.is_control_flow_graph:  # only functions ask for values when they are called
        graph = graph.outer_graph
    with graph.as_default():
        return graph.capture_call_time_value(
            lambda: tf.constant(answer(op_type, process_set), tf.int32), tf.TensorSpec([], tf.int32),
            key=(op_type, process_set),
        )  # fmt: skip


def _result_shape(kind: Kind | None, shape: tuple[int, ...], request: GraphRequest) -> tuple[int, ...]:
    if kind is not Kind.REDUCESCATTER or not shape:
        return shape
    members = context.engine().sets.as_dict()[request.process_set]
    rows, extra = divmod(shape[0], len(members))
    return (rows + (members.index(context.world().rank) < extra), *shape[1:])


@functools.cache
def _register() -> str:
    """Register the custom call with XLA, and return its name."""
    add_custom_call(_TARGET, _handle)
    return _TARGET


@functools.lru_cache(maxsize=1024)
def _decoded(text: bytes) -> tuple[_Call, Node]:
    call = msgspec.json.decode(text, type=_Call)
    return call, Node(call.op_type, call.request, len(call.inputs))


@immortal
@HANDLER
def _handle(out: int, ins: Any, opaque: int, length: int, status: int) -> None:
    threading.current_thread()  # register this XLA thread with Python, so that reports can show that it waits
    try:
        call, node = _decoded(ctypes.string_at(opaque, length))
        kinds = [np.dtype(DTYPES[name].as_numpy_dtype) for name in call.dtypes]
        sources = [over(ins[i], shape, kinds[i]) for i, shape in enumerate(call.inputs)]
        places = ctypes.cast(out, ctypes.POINTER(_P))
        ctypes.memset(places[len(call.outputs)], 0, 4)
        targets = [over(places[i], shape, kinds[i]) for i, shape in enumerate(call.outputs)]
        what, engine = node.call(()), context.engine()
        if (now := tuple(_result_shape(node.kind, shape, call.request) for shape in call.inputs)) != call.outputs:
            raise RequestError(
                f"a reducescatter was compiled by jit_compile=True for results of the shapes {[*call.outputs]}, and "
                f"with {engine.size} ranks they are {[*now]}; in an elastic job call it outside of that function, or "
                "leave jit_compile out"
            )
        node.as_user(lambda: engine.run(what, _Outputs(targets), sources))
    except BaseException as error:
        remember(error)
        fail_custom_call(status, f"{type(error).__name__}: {error}".encode())
