"""NCCL, by its C interface: groups of ranks that move and reduce tensors where they are, each on its own GPU.

Communicators never block. So a waiting thread checks the other ranks meanwhile, and ends a communicator whose kernel
would wait for ever for a lost rank. Torch's groups of NCCL would end the process in this case.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from horovod.core.requests import ReduceOp
from horovod.errors import HorovodInternalError, InitError
from horovod.transports.base import Watch
from horovod.transports.groups import failed, look_for, wait_until

if TYPE_CHECKING:
    from horovod.rendezvous.client import JobStore

__all__ = ["NcclGroup", "NcclGroups", "check_nccl"]

_LIBRARY = "libnccl.so.2"
_SUCCESS, _IN_PROGRESS = 0, 7
#: The first version whose communicators need not block, in NCCL's notation.
_LEAST_VERSION = 21400
_MAGIC = 0xCAFEBEEF
_DTYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_OPS = {ReduceOp.SUM: 0, ReduceOp.PRODUCT: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3}
_ONE_GPU = (
    "NCCL needs a GPU for each rank, and several ranks use the same one: call torch.cuda.set_device(hvd.local_rank()) "
    "after hvd.init(), or start no more ranks than there are GPUs"
)


class _Id(ctypes.Structure):
    """The identifier by which the members of a communicator find each other."""

    _fields_ = [("internal", ctypes.c_byte * 128)]


class _Config(ctypes.Structure):
    """The part of NCCL's configuration that every version since 2.14 has."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    ]


@functools.cache
def _library() -> ctypes.CDLL:
    """Return the NCCL library that torch has loaded, or the one that comes with torch.

    Raises:
        OSError: there is no NCCL library.
    """
    places = [_LIBRARY]
    with contextlib.suppress(ImportError):
        spec = find_spec("nvidia.nccl")
        folders = spec.submodule_search_locations if spec is not None else None
        places += [str(Path(folder) / "lib" / _LIBRARY) for folder in folders or ()]
    library: ctypes.CDLL | None = None
    for place in places:
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(place)
            break
    if library is None:
        raise OSError(f"no {_LIBRARY}")
    pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    for name, arguments in {
        "ncclGetVersion": [ctypes.POINTER(number)],
        "ncclGetUniqueId": [ctypes.POINTER(_Id)],
        "ncclCommInitRankConfig": [ctypes.POINTER(pointer), number, _Id, number, ctypes.POINTER(_Config)],
        "ncclCommGetAsyncError": [pointer, ctypes.POINTER(number)],
        "ncclCommAbort": [pointer],
        "ncclAllReduce": [pointer, pointer, size, number, number, pointer, pointer],
        "ncclReduceScatter": [pointer, pointer, size, number, number, pointer, pointer],
        "ncclAllGather": [pointer, pointer, size, number, pointer, pointer],
        "ncclBroadcast": [pointer, pointer, size, number, number, pointer, pointer],
        "ncclSend": [pointer, size, number, number, pointer, pointer],
        "ncclRecv": [pointer, size, number, number, pointer, pointer],
        "ncclGroupStart": [],
        "ncclGroupEnd": [],
    }.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, number
    library.ncclGetErrorString.argtypes, library.ncclGetErrorString.restype = [number], ctypes.c_char_p
    library.ncclGetLastError.argtypes, library.ncclGetLastError.restype = [pointer], ctypes.c_char_p
    return library


def check_nccl() -> None:
    """Raise an error if NCCL cannot be used here.

    Raises:
        InitError: there is no GPU, no NCCL, or it is too old.
    """
    asked = "HOROVOD_GPU_OPERATIONS=NCCL"
    if not torch.cuda.is_available():
        raise InitError(f"{asked} needs a GPU, and torch sees none here")
    version = ctypes.c_int()
    try:
        _library().ncclGetVersion(ctypes.byref(version))
    except (OSError, AttributeError) as error:
        raise InitError(f"{asked} needs NCCL, which comes with torch for CUDA: pip install torch ({error})") from None
    if version.value < _LEAST_VERSION:
        raise InitError(f"{asked} needs NCCL 2.14 or newer; this one says {version.value}")


class NcclGroup:
    """Ranks that all call the same operations in the same order; operations run on the current stream."""

    def __init__(self, communicator: ctypes.c_void_p, ranks: Sequence[int], me: int, watch: Watch) -> None:
        self._communicator: ctypes.c_void_p | None = communicator
        self._others = [rank for rank in ranks if rank != ranks[me]]
        self._me, self._watch = me, watch
        self._nccl = _library()

    def reduce(self, tensors: Sequence[torch.Tensor], op: ReduceOp) -> None:
        """Combine tensors of one dtype over all ranks, in place."""
        with self._together():
            for tensor in tensors:
                at, kind = tensor.data_ptr(), _DTYPES[tensor.dtype]
                self._call("ncclAllReduce", at, at, tensor.numel(), kind, _OPS[op])

    def reduce_scatter(self, part: torch.Tensor, whole: torch.Tensor, op: ReduceOp) -> None:
        """Combine a tensor over all ranks; each rank gets an equal part."""
        with self._together():
            kind = _DTYPES[part.dtype]
            self._call("ncclReduceScatter", whole.data_ptr(), part.data_ptr(), part.numel(), kind, _OPS[op])

    def gather(self, part: torch.Tensor, whole: torch.Tensor, counts: Sequence[int]) -> None:
        """Concatenate the bytes of all ranks, ``counts`` of each, on all ranks."""
        kind, target = _DTYPES[torch.uint8], whole.data_ptr()
        with self._together():
            if len(set(counts)) == 1:
                self._call("ncclAllGather", part.data_ptr(), target, counts[0], kind)
                return
            for place, count in enumerate(counts):
                if count:
                    source = part.data_ptr() if place == self._me else target
                    self._call("ncclBroadcast", source, target, count, kind, place)
                target += count

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy the bytes of the rank at place ``root`` to all others."""
        with self._together():
            at = tensor.data_ptr()
            self._call("ncclBroadcast", at, at, tensor.numel(), _DTYPES[torch.uint8], root)

    def exchange(
        self, send: torch.Tensor, send_counts: Sequence[int], receive: torch.Tensor, receive_counts: Sequence[int]
    ) -> None:
        """Send the i-th part of the bytes to the i-th rank, and receive its part for this one."""
        kind, source, target = _DTYPES[torch.uint8], send.data_ptr(), receive.data_ptr()
        with self._together():
            for place, (sent, received) in enumerate(zip(send_counts, receive_counts, strict=True)):
                if sent:
                    self._call("ncclSend", source, sent, kind, place)
                if received:
                    self._call("ncclRecv", target, received, kind, place)
                source, target = source + sent, target + received

    def wait(self) -> None:
        """Block until the work on the current stream is done.

        Raises:
            PeerLostError: a rank of the group died meanwhile.
            StallError: a rank did not go on within the timeout.
            HorovodInternalError: NCCL failed.
        """
        event = torch.cuda.current_stream().record_event()

        def is_over(slice_s: float) -> bool:
            found = look_for(event.query, slice_s)
            if not found:
                self._check(self._state())
            return found

        self._wait_until(is_over)

    def connect(self) -> None:
        """Block until all members have come."""
        self._wait_until(self._is_settled)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Hand the calls of the block to NCCL at once, and wait until they are on the stream."""
        try:
            self._check(self._nccl.ncclGroupStart())
            try:
                yield
            finally:
                result = self._nccl.ncclGroupEnd()
            self._check(result)
        except _NcclError as error:
            raise self._failed(error) from None
        self._wait_until(self._is_settled)

    def _call(self, name: str, *arguments: Any) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self._check(getattr(self._nccl, name)(*arguments, self._communicator, stream))

    def _is_settled(self, slice_s: float) -> bool:
        """Check for a moment whether NCCL has done its pending calls."""
        found = look_for(lambda: self._state() != _IN_PROGRESS, slice_s)
        if found:
            self._check(self._state())
        return found

    def _state(self) -> int:
        state = ctypes.c_int()
        self._nccl.ncclCommGetAsyncError(self._communicator, ctypes.byref(state))
        return state.value

    def _check(self, result: int) -> None:
        if result in (_SUCCESS, _IN_PROGRESS):
            return
        text = self._nccl.ncclGetErrorString(result).decode(errors="replace")
        last = (self._nccl.ncclGetLastError(self._communicator) or b"").decode(errors="replace").strip()
        raise _NcclError(f"{text}: {last}" if last else text)

    def _wait_until(self, is_over: Any) -> None:
        """Block until ``is_over`` returns true; end the communicator after an error."""
        try:
            wait_until(is_over, self._others, self._watch)
        except _NcclError as error:
            raise self._failed(error) from None
        except BaseException:
            self.abort()
            raise

    def _failed(self, error: _NcclError) -> HorovodInternalError:
        """End the communicator, and return the error to raise; see ``failed``."""
        self.abort()
        if "Duplicate GPU" in str(error):
            return HorovodInternalError(f"{_ONE_GPU} ({error})")
        return failed(error, "nccl", self._others, self._watch)

    def abort(self) -> None:
        """End the communicator and its pending operations."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            self._nccl.ncclCommAbort(communicator)


class _NcclError(Exception):
    """An error that NCCL has reported."""


class NcclGroups:
    """Ranks whose GPUs exchange tensors; in ``store`` they publish how to find each other."""

    name = "nccl"

    def __init__(self, rank: int, store: JobStore, watch: Watch) -> None:
        self._rank, self._store, self._watch = rank, store, watch
        self._groups: dict[tuple[int, ...], NcclGroup] = {}

    def group(self, ranks: Sequence[int], device: torch.device) -> NcclGroup:
        """Return the group of some ranks, which all first ask for it at the same point of the log, and connect then."""
        key = tuple(ranks)
        found = self._groups.get(key)
        if found is None:
            found = self._groups[key] = self._make(key, device)
        return found

    def _make(self, ranks: tuple[int, ...], device: torch.device) -> NcclGroup:
        nccl, me, own = _library(), ranks.index(self._rank), _Id()
        others = [rank for rank in ranks if rank != self._rank]
        key = f"nccl/{','.join(map(str, ranks))}"
        if me == 0:
            nccl.ncclGetUniqueId(ctypes.byref(own))
            self._store.set(key, bytes(own))
        said: list[bytes] = []

        def has_said(slice_s: float) -> bool:
            with contextlib.suppress(TimeoutError):
                said.append(self._store.get(key, slice_s))
            return bool(said)

        wait_until(has_said, others, self._watch)
        config = _Config(ctypes.sizeof(_Config), _MAGIC, _LEAST_VERSION, 0)
        communicator = ctypes.c_void_p()
        with torch.cuda.device(device):
            result = nccl.ncclCommInitRankConfig(
                ctypes.byref(communicator), len(ranks), _Id.from_buffer_copy(said[0]), me, ctypes.byref(config)
            )
            group = NcclGroup(communicator, ranks, me, self._watch)
            if result not in (_SUCCESS, _IN_PROGRESS):
                raise failed(_NcclError(nccl.ncclGetErrorString(result).decode()), "nccl", others, self._watch)
            group.connect()
        return group

    def close(self) -> None:
        """End all groups, and close the store."""
        self._store.close()
        for group in self._groups.values():
            group.abort()
        self._groups.clear()
