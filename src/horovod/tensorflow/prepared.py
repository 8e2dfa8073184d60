"""What is the same in all executions of a node of a graph: TensorFlow is asked for nothing twice."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from horovod.core.requests import Kind
from horovod.engine.calls import Call, call
from horovod.tensorflow.adapter import DTYPES
from horovod.tensorflow.library import lib, quick
from horovod.tensorflow.requests import OP_TYPES, GraphRequest

__all__ = ["DTYPE_NUMBERS", "NUMPY_DTYPES", "Array", "Layout", "Node"]

Array = np.ndarray[Any, np.dtype[Any]]

#: TensorFlow's numbers of the engine's dtypes, and what they are in numpy.
DTYPE_NUMBERS: dict[str, int] = {name: dtype.as_datatype_enum for name, dtype in DTYPES.items()}
NUMPY_DTYPES = {dtype.as_datatype_enum: np.dtype(dtype.as_numpy_dtype) for dtype in DTYPES.values()}
# An attribute of an enum class costs more than a name, in every operation.
_ALLREDUCE, _BROADCAST, _JOIN = Kind.ALLREDUCE, Kind.BROADCAST, Kind.JOIN
_count_dims, _dim = quick.TF_NumDims, quick.TF_Dim
_INT_NBYTES = ctypes.sizeof(ctypes.c_int)
#: How many places of a tensor are remembered.
_MOST_KNOWN = 8


class Layout:
    """What a tensor of a node looks like, and arrays over the places where such have been.

    Nobody looks into these arrays but while there is a tensor.

    Args:
        shape: its shape.
        kind: of its elements.
    """

    __slots__ = ("_known", "_memory", "dims", "dims_place", "kind", "nbytes", "shape")

    def __init__(self, shape: tuple[int, ...], kind: np.dtype[Any]) -> None:
        self.shape = shape
        self.kind = kind
        self.dims = (ctypes.c_int64 * len(shape))(*shape)
        self.dims_place = ctypes.addressof(self.dims)
        self.nbytes = nbytes = math.prod(shape) * kind.itemsize
        self._memory: Any = ctypes.c_char * nbytes if nbytes else None
        self._known: dict[int | None, Array] = {}

    def over(self, address: int | None) -> Array:
        """Return an array over memory of TensorFlow's, which often gives the same again: then the same array."""
        array = self._known.get(address)
        if array is None:
            memory = self._memory.from_address(address) if self._memory is not None and address else None
            array = np.ndarray(self.shape, self.kind, memory)
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[address] = array
        return array


class Node:
    """One node of a graph, ready to run.

    Args:
        op_type: Horovod's name of the operation.
        request: the settings.
        count: how many inputs there are.
    """

    def __init__(self, op_type: str, request: GraphRequest, count: int) -> None:
        self.op_type = op_type
        self.kind = kind = OP_TYPES.get(op_type)
        self.request = request
        self.as_user = request.site.stand_in()
        self.key = (-1 if kind is None else int(kind), request.process_set, request.name)
        self.in_place = kind is _ALLREDUCE or kind is _BROADCAST
        self.call = None if kind is None else self.call_with(())
        self.count = count
        self._candidates = (ctypes.c_int * count)(*range(count))
        self._layouts: dict[int, Layout] = {}
        self._in_vain = 0
        self._runs = 0

    def call_with(self, splits: tuple[int, ...]) -> Call:
        """Return what is asked of the engine, with the splits of an alltoall."""
        assert self.kind is not None
        if self.kind is _JOIN:
            return Call(self.kind, "join")
        r = self.request
        return call(self.kind, r.name, r.process_set, r.op, r.prescale, r.postscale, r.root, splits)

    def candidate(self, index: int) -> int:
        """Return where the number of an input stands in memory."""
        return ctypes.addressof(self._candidates) + index * _INT_NBYTES

    def layout(self, index: int, tensor: int | None) -> Layout:
        """Return what an input looks like: most often the same as last time."""
        shape = tuple([_dim(tensor, dim) for dim in range(_count_dims(tensor))])
        layout = self._layouts.get(index)
        if layout is None or layout.shape != shape:
            layout = self._layouts[index] = Layout(shape, NUMPY_DTYPES[lib.TF_TensorType(tensor)])
        return layout

    def lingers(self) -> bool:
        """Whether the next run should look for its result for a moment: not where that has been in vain lately."""
        self._runs += 1
        return not self._in_vain or self._runs % (1 << min(self._in_vain, 6)) == 0

    def lingered(self, paid: bool) -> None:
        """Note whether the result came meanwhile."""
        self._in_vain = 0 if paid else self._in_vain + 1
