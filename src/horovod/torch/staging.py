"""Transfer of CUDA tensors: directly to a transport that works on the device, or through host memory.

In host memory they lie in pinned blocks of the arena, copied on a separate stream.
The copy to the host starts when the operation is submitted, so it overlaps with the next work of the GPU; the
engine waits for it when it executes the entry. The copy back is ordered before the work that the caller's
stream gets after ``synchronize``, but the host does not wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from horovod import context
from horovod.logs import logger

if TYPE_CHECKING:
    from horovod.engine.ports import Transport

__all__ = ["CudaTensors", "StagedCudaTensors", "ordinary"]


def ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias without gradient history that can be written in any mode.

    A tensor made in inference mode, a property of a thread, cannot be written outside it, but the engine runs on
    several threads and reuses its tensors in the next call.
    """
    if not tensor.is_inference():
        return tensor.detach()
    with torch.inference_mode(False):
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.is_conj():
            alias = alias.conj()
        return torch._neg_view(alias) if tensor.is_neg() else alias


def _not_while_capturing() -> None:
    """Refuse an operation during the capture of a CUDA graph: a replay could not negotiate with other ranks.

    Raises:
        RuntimeError: a CUDA graph is being captured.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a collective cannot be part of a CUDA graph: move it out of torch.cuda.graph(), or of what "
            "torch.compile(mode='reduce-overhead') records"
        )


class CudaTensors:
    """Passes the tensors of one operation, contiguous on one CUDA device, on without leaving it."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        _not_while_capturing()
        self.buffers = buffers
        self._device = buffers[0].device
        self._results: Sequence[torch.Tensor] = ()

    def begin(self) -> None:
        """Record that the caller's stream holds all work that writes the tensors."""
        self._written = torch.cuda.current_stream(self._device).record_event()

    def before(self) -> None:
        """Block until the tensors are written."""
        self._written.synchronize()

    def after(self, outputs: Sequence[torch.Tensor]) -> None:
        """Take the results, which are complete."""
        self._results = outputs

    def collect(self) -> list[torch.Tensor]:
        """Return the results; their memory is reused only after the caller's stream has finished with them."""
        stream = torch.cuda.current_stream(self._device)
        for result in self._results:
            result.record_stream(stream)
        return list(self._results)


class _Block:
    """One reusable pinned block; ``idle`` is the event after its last copy."""

    def __init__(self, transport: Transport, nbytes: int) -> None:
        self.memory = torch.frombuffer(transport.allocate(nbytes), dtype=torch.uint8)
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(self.memory.data_ptr(), nbytes, 0)))  # type: ignore[no-untyped-call]
        self.idle: Any = None


class _Pool:
    """Pinned blocks of one engine, by size in bytes, and one stream per device."""

    def __init__(self) -> None:
        self._generation = -1
        self._free: dict[int, list[_Block]] = {}
        self._registered: list[_Block] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def take(self, nbytes: int) -> _Block:
        if self._generation != context.init_count():
            self._renew()
        nbytes = max(4096, 1 << (nbytes - 1).bit_length())
        free = self._free.setdefault(nbytes, [])
        if not free:
            with torch.inference_mode(False):
                block = _Block(context.engine().transport, nbytes)
            self._registered.append(block)
            return block
        block = free.pop()
        if block.idle is not None:
            block.idle.synchronize()
        return block

    def give(self, block: _Block, idle: Any) -> None:
        block.idle = idle
        self._free.setdefault(block.memory.nbytes, []).append(block)

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return stream

    def _renew(self) -> None:
        torch.cuda.synchronize()
        for block in self._registered:
            torch.cuda.cudart().cudaHostUnregister(block.memory.data_ptr())  # type: ignore[no-untyped-call]
        self._registered.clear()
        self._free.clear()
        self._generation = context.init_count()
        world = context.world()
        has_choice = not context.config().gpu_operations and torch.cuda.device_count() >= world.local_size
        if world.rank == 0 and has_choice:
            logger.warning(
                "tensors of the GPUs travel through host memory; where each rank has a GPU of its own, "
                "HOROVOD_GPU_OPERATIONS=NCCL moves them from GPU to GPU (=GLOO leaves it as it is, without this line)"
            )


_pool = _Pool()


class StagedCudaTensors:
    """Copies the tensors of one operation, on one device, to the host, and the results back, to targets or new ones."""

    def __init__(self, tensors: Sequence[torch.Tensor], targets: Sequence[torch.Tensor] | None) -> None:
        _not_while_capturing()
        self._device = tensors[0].device
        self._targets = targets
        self._stream = _pool.stream(self._device)
        self._blocks: list[_Block] = []
        # host buffers with the tensors' shapes and dtypes, filled once `before` has returned
        self.buffers: list[torch.Tensor] = []
        self._results: list[torch.Tensor] = []
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for tensor in tensors:
                # Resolve lazy conj and neg before the asynchronous copy.
                source = tensor.detach().resolve_conj().resolve_neg().contiguous()
                block = _pool.take(source.nbytes)
                host = block.memory[: source.nbytes].view(source.dtype).view(source.shape)
                host.copy_(source, non_blocking=True)
                source.record_stream(self._stream)
                self._blocks.append(block)
                self.buffers.append(host)
            self._arrived = self._stream.record_event()

    def before(self) -> None:
        """Block until the tensors are in host memory; called by the thread that executes the entry."""
        self._arrived.synchronize()

    def after(self, outputs: Sequence[torch.Tensor]) -> None:
        """Start copying the results to the device; called by the thread that executed the entry."""
        with torch.cuda.stream(self._stream):
            for index, output in enumerate(outputs):
                if self._targets is not None:
                    result = ordinary(self._targets[index])
                else:
                    result = torch.empty(output.shape, dtype=output.dtype, device=self._device)
                result.copy_(output, non_blocking=True)
                result.record_stream(self._stream)
                self._results.append(result)
            self._delivered = self._stream.record_event()
        for block in self._blocks:
            _pool.give(block, self._delivered)

    def collect(self) -> list[torch.Tensor]:
        """Return the results; the caller's stream waits for them, but the host does not."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._delivered)
        if self._targets is not None:
            return list(self._targets)
        for result in self._results:
            # Otherwise the copy stream could reuse the memory while the caller's stream still reads it.
            result.record_stream(stream)
        return self._results
