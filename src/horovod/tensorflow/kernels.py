"""The kernels of the operations in graphs: they hand TensorFlow's memory to the engine and wait for nobody.

A kernel submits, and returns to the executor; when the engine has the result, a thread of ``runs`` tells TensorFlow
that the operation is done. So no thread of TensorFlow's pools ever waits for another rank: any number of collectives
may be in flight, in any order, with one inter-op thread.
"""

from __future__ import annotations

import ctypes
import itertools
from _thread import get_ident

from horovod.tensorflow.adapter import DTYPES
from horovod.tensorflow.library import (
    COMPUTE,
    CREATE,
    DELETE,
    attribute,
    attribute_size,
    define_op,
    immortal,
    register_kernel,
)
from horovod.tensorflow.prepared import Node
from horovod.tensorflow.requests import OP_TYPES, QUERIES, GraphRequest
from horovod.tensorflow.runs import Run

__all__ = ["register"]

#: Nodes that have a kernel, by the number that TensorFlow knows it by.
_nodes: dict[int, Node] = {}
_ids = itertools.count(1)
#: Threads of TensorFlow's that Python remembers, and how many at most.
_remembered: set[int] = set()
_MOST_REMEMBERED = 256
_remember = ctypes.pythonapi.PyGILState_Ensure


def _create(op_type: str, construction: int) -> int:
    try:
        request = GraphRequest.decode(attribute(construction, b"request"))
        key = next(_ids)
        _nodes[key] = Node(op_type, request, attribute_size(construction, b"T"))
        return key
    except Exception:
        return 0


@COMPUTE
def _compute(key: int, context: int, done: int) -> None:
    if (thread := get_ident()) not in _remembered and len(_remembered) < _MOST_REMEMBERED:
        # What Python keeps of a thread of C++ is made when that calls, and thrown away when it returns, page by page:
        # 35 µs, of 60 that a small collective may take. Of this call no return is ever told.
        _remembered.add(thread)
        _remember()
    Run(_nodes[key], context, done).start()


@DELETE
def _delete(key: int, nodes: dict[int, Node] = _nodes) -> None:
    # TensorFlow lets go of graphs when Python has cleared the names of this module already.
    nodes.pop(key, None)


def register() -> None:
    """Make the operations known to TensorFlow; once per process."""
    for name in (*OP_TYPES, *QUERIES):
        define_op(
            name,
            (f"T: list({{{_SPEC}}}) >= 0", f"U: list({{{_SPEC}}}) >= 0", "N: int >= 0", "request: string"),
            ("tensors: T", "order: N * resource"),
            ("outputs: U",),
        )
        creator = CREATE(lambda construction, op_type=name: _create(op_type, construction))
        register_kernel(name, immortal(creator), immortal(_compute), immortal(_delete))


_SPEC = ", ".join({"float32": "float", "float64": "double", "float16": "half"}.get(name, name) for name in DTYPES)
