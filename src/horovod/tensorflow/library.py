"""TensorFlow's C interface for operations and kernels, through ctypes, without compiled code.

The functions are those of ``tensorflow/c/kernels.h``, ``ops.h``, ``tf_status.h`` and ``tf_tensor.h``, which TensorFlow
exports for plug-ins.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

__all__ = [
    "COMPUTE",
    "CREATE",
    "DELETE",
    "UNKNOWN_SHAPE",
    "Status",
    "attribute",
    "attribute_size",
    "define_op",
    "immortal",
    "lib",
    "quick",
    "register_kernel",
]

_P = ctypes.c_void_p
_INT64S = ctypes.POINTER(ctypes.c_int64)
_INTS = ctypes.POINTER(ctypes.c_int)

#: name: (result, arguments)
_PROTOTYPES: dict[str, tuple[Any, Sequence[Any]]] = {
    "TF_NewStatus": (_P, ()),
    "TF_DeleteStatus": (None, (_P,)),
    "TF_GetCode": (ctypes.c_int, (_P,)),
    "TF_Message": (ctypes.c_char_p, (_P,)),
    "TF_SetStatus": (None, (_P, ctypes.c_int, ctypes.c_char_p)),
    "TF_NewOpDefinitionBuilder": (_P, (ctypes.c_char_p,)),
    "TF_OpDefinitionBuilderAddAttr": (None, (_P, ctypes.c_char_p)),
    "TF_OpDefinitionBuilderAddInput": (None, (_P, ctypes.c_char_p)),
    "TF_OpDefinitionBuilderAddOutput": (None, (_P, ctypes.c_char_p)),
    "TF_OpDefinitionBuilderSetIsStateful": (None, (_P, ctypes.c_bool)),
    "TF_OpDefinitionBuilderSetShapeInferenceFunction": (None, (_P, _P)),
    "TF_RegisterOpDefinition": (None, (_P, _P)),
    "TF_NewAsyncKernelBuilder": (_P, (ctypes.c_char_p, ctypes.c_char_p, _P, _P, _P)),
    "TF_RegisterKernelBuilder": (None, (ctypes.c_char_p, _P, _P)),
    "TF_OpKernelConstruction_GetAttrSize": (None, (_P, ctypes.c_char_p, _INTS, _INTS, _P)),
    "TF_OpKernelConstruction_GetAttrString": (None, (_P, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, _P)),
    "TF_OpKernelConstruction_Failure": (None, (_P, _P)),
    "TF_OpKernelContext_Failure": (None, (_P, _P)),
    "TF_GetInput": (None, (_P, ctypes.c_int, _P, _P)),
    "TF_AllocateOutput": (_P, (_P, ctypes.c_int, ctypes.c_int, _INT64S, ctypes.c_int, ctypes.c_size_t, _P)),
    "TF_ForwardInputOrAllocateOutput": (
        _P, (_P, _P, ctypes.c_int, ctypes.c_int, _P, ctypes.c_int, _P, _P),
    ),
    "TF_RunAsyncOpKernelDoneCallback": (None, (_P,)),
    "TF_TensorType": (ctypes.c_int, (_P,)),
    "TF_NumDims": (ctypes.c_int, (_P,)),
    "TF_Dim": (ctypes.c_int64, (_P, ctypes.c_int)),
    "TF_TensorData": (_P, (_P,)),
    "TF_DeleteTensor": (None, (_P,)),
}  # fmt: skip

#: ``create(construction) -> kernel``, ``compute(kernel, context, done)``, ``delete(kernel)``
CREATE = ctypes.CFUNCTYPE(_P, _P)
COMPUTE = ctypes.CFUNCTYPE(None, _P, _P, _P)
DELETE = ctypes.CFUNCTYPE(None, _P)


def _load(loader: type[ctypes.CDLL]) -> ctypes.CDLL:
    folder = Path(tf.sysconfig.get_lib())
    path = next(iter(sorted(folder.glob("libtensorflow_framework*"))), None)
    try:
        library = loader(str(path))
        for name, (result, arguments) in _PROTOTYPES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise ImportError(
            f"TensorFlow {tf.__version__} in {folder} has no C interface for kernels ({error}); "
            "horovod.tensorflow needs TensorFlow 2.16 or newer as it comes from pip"
        ) from None
    return library


lib = _load(ctypes.CDLL)
#: The same library for short functions: calls keep the GIL, because releasing it would take longer than the call.
quick = _load(ctypes.PyDLL)
#: A shape function that leaves shapes unknown; TensorFlow's own, so that it runs no Python.
UNKNOWN_SHAPE = ctypes.cast(lib.TF_ShapeInferenceContextSetUnknownShape, _P)


class Status:
    """A TF_Status, in which C calls report errors."""

    __slots__ = ("pointer",)

    def __init__(self) -> None:
        self.pointer: int = quick.TF_NewStatus()  # address of the status

    def __del__(self) -> None:
        quick.TF_DeleteStatus(self.pointer)

    def check(self) -> None:
        """Raise the error that a call has reported.

        Raises:
            RuntimeError: TensorFlow reported an error.
        """
        if quick.TF_GetCode(self.pointer):
            raise RuntimeError(quick.TF_Message(self.pointer).decode(errors="replace"))


def immortal(function: Any) -> Any:
    """Return a ctypes function that is never freed: TensorFlow may call it after Python has cleared all modules."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(function))
    return function


def define_op(name: str, attributes: Sequence[str], inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Register an operation with side effects; the arguments are TensorFlow's specification strings."""
    builder = _P(lib.TF_NewOpDefinitionBuilder(name.encode()))
    for spec in attributes:
        lib.TF_OpDefinitionBuilderAddAttr(builder, spec.encode())
    for spec in inputs:
        lib.TF_OpDefinitionBuilderAddInput(builder, spec.encode())
    for spec in outputs:
        lib.TF_OpDefinitionBuilderAddOutput(builder, spec.encode())
    lib.TF_OpDefinitionBuilderSetIsStateful(builder, True)
    lib.TF_OpDefinitionBuilderSetShapeInferenceFunction(builder, UNKNOWN_SHAPE)
    status = Status()
    lib.TF_RegisterOpDefinition(builder, status.pointer)
    status.check()


def register_kernel(name: str, create: Any, compute: Any, delete: Any) -> None:
    """Register the kernel of an operation on the CPU; the functions must be ``immortal``."""
    builder = _P(lib.TF_NewAsyncKernelBuilder(name.encode(), b"CPU", create, compute, delete))
    status = Status()
    lib.TF_RegisterKernelBuilder(name.encode(), builder, status.pointer)
    status.check()


def _sizes(construction: int, name: bytes) -> tuple[int, int]:
    status, items, nbytes = Status(), ctypes.c_int(), ctypes.c_int()
    lib.TF_OpKernelConstruction_GetAttrSize(construction, name, items, nbytes, status.pointer)
    status.check()
    return items.value, nbytes.value


def attribute(construction: int, name: bytes) -> bytes:
    """Return a string attribute of a kernel under construction."""
    status, (_, nbytes) = Status(), _sizes(construction, name)
    value = ctypes.create_string_buffer(nbytes + 1)
    lib.TF_OpKernelConstruction_GetAttrString(construction, name, value, nbytes, status.pointer)
    status.check()
    return value.raw[:nbytes]


def attribute_size(construction: int, name: bytes) -> int:
    """Return the length of a list attribute of a kernel under construction."""
    return _sizes(construction, name)[0]
