"""Creation of nodes: add an operation to the graph under construction, or run it immediately under a gradient tape."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context as eager_context
from tensorflow.python.eager import execute, record
from tensorflow.python.framework import op_def_library
from tensorflow.python.util import tf_stack

from horovod.bindings import sites
from horovod.bindings.sites import Site
from horovod.errors import RequestError
from horovod.tensorflow import kernels, order, unsafe, xla
from horovod.tensorflow.adapter import check_dtype
from horovod.tensorflow.requests import GraphRequest

__all__ = ["is_recorded", "node", "refuse_parallel", "unique_name", "user_site"]

kernels.register()
unsafe.skip_autograph()

_PLUMBING = ("/horovod/", "/tensorflow/python/", "/keras/src/", "/tf_keras/", "/khorovod_ipu/")
_UNFIT = re.compile(r"[^A-Za-z0-9_.\\/>-]")


def user_site() -> Site:
    """Return the user's line; while a graph is built, map AutoGraph's code back to the user's file."""
    if not tf.executing_eagerly():
        for frame in reversed(list(tf_stack.extract_stack())):
            if not any(part in frame.filename for part in _PLUMBING):
                return Site(frame.filename, frame.lineno, frame.name)
    return sites.user_site()


def refuse_parallel() -> None:
    """Refuse a collective in a function that runs for several elements or iterations at once: ranks match executions by
    their order.

    Raises:
        RequestError: the function being traced is one of ``Dataset.map(num_parallel_calls=)`` or the like; or the body
            of a loop in a graph of TensorFlow 1 that has ``parallel_iterations`` above 1.
    """
    for frame, _ in traceback.walk_stack(None):
        code, given = frame.f_code, frame.f_locals
        is_dataset = code.co_name == "__init__" and "/tensorflow/python/data/" in code.co_filename
        if is_dataset and "Parallel" in type(given["self"]).__name__:
            raise RequestError(
                "a collective cannot run in a Dataset.map() or interleave() with num_parallel_calls: its elements come "
                "in another order on each rank. Leave out num_parallel_calls there, or call it on the batches outside"
            )
        is_loop = code.co_name == "while_loop" and code.co_filename.endswith("/tensorflow/python/ops/while_loop.py")
        if is_loop and given["parallel_iterations"] > 1 and not order.has_tokens():
            raise RequestError(
                "a collective cannot run in a loop of a graph of TensorFlow 1 with parallel_iterations="
                f"{given['parallel_iterations']}: its iterations come in another order on each rank. Pass "
                "parallel_iterations=1 to the tf.while_loop(), tf.map_fn() or the like, or call it outside"
            )


def unique_name(op_type: str, name: str | None, tensors: Sequence[Any], ignore_name_scope: bool) -> tuple[str, str]:
    """Return the name of a new node, from the user's name or its tensors, and the key of its match on other ranks."""
    if not name:
        # An eager tensor that a function has captured has no name.
        of = tensors[0].name if len(tensors) and tf.is_symbolic_tensor(tensors[0]) else ""
        name = f"{op_type}_{re.sub(r'[^A-Za-z0-9_]', '_', of)}" if of else op_type
    name = _UNFIT.sub("_", name)
    if not (name[0].isalnum() or name[0] == "."):
        name = f"n{name}"
    full = tf.compat.v1.get_default_graph().unique_name(name, mark_as_used=False)
    return name, order.distinct(full.rpartition("/")[2] if ignore_name_scope else full)


def is_recorded(tensors: Sequence[Any]) -> bool:
    """Return whether a gradient tape watches one of these eager tensors."""
    return bool(record.could_possibly_record()) and pywrap_tfe.TFE_Py_TapeSetPossibleGradientTypes(tensors) != 0


def _keep_threads() -> bool:
    """Return whether kernels block their threads while they wait; then only program order avoids deadlocks."""
    if unsafe.known_layout.is_known:
        return False
    with tf.init_scope():
        if unsafe.known_layout.is_known is None and tf.executing_eagerly():
            request = GraphRequest(site=sites.user_site()).encode().encode()
            attributes: Any = ("T", [], "U", [tf.int32.as_datatype_enum], "N", 0, "request", request)
            execute.execute(b"HorovodProcessSetIncluded", 1, [], attrs=attributes, ctx=eager_context.context())
    return unsafe.known_layout.is_known is False


def node(
    op_type: str,
    tensors: Sequence[Any],
    outputs: Sequence[tf.DType],
    request: GraphRequest,
    name: str | None = None,
) -> list[Any]:
    """Add an operation, which has Horovod's name, to the graph, or run it now; differentiable. The shapes of its
    results are unknown.
    """
    for tensor in tensors:
        check_dtype(tensor.dtype)
    if xla.is_compiling():
        return xla.compiled(op_type, tensors, request)
    inputs = list(tensors)
    attributes = (
        "T", [tensor.dtype.as_datatype_enum for tensor in inputs],
        "U", [dtype.as_datatype_enum for dtype in outputs],
        "N", 0,
        "request", request.encode().encode(),
    )  # fmt: skip
    made: Any
    if tf.executing_eagerly():
        eager = eager_context.context()
        made = execute.execute(op_type.encode(), len(outputs), inputs, attrs=attributes, ctx=eager)
        if eager.is_async():
            # Wait here: a recording tape would wait for the results while holding the GIL, which the kernel needs.
            eager.executor.wait()
    else:
        token = order.token("" if _keep_threads() else request.name) if inputs else None
        with unsafe.without_own_frames():
            made = op_def_library.apply_op(
                op_type, tensors=inputs, order=[] if token is None else [token], U=list(outputs),
                request=request.encode(), name=name,
            )  # fmt: skip
    if not isinstance(made, list):
        return [made]  # an operation without results
    if execute.must_record_gradient():
        execute.record_gradient(op_type, inputs, attributes, made)
    return made
