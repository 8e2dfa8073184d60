"""A device that is host memory in truth: what NCCL's transport does, over Gloo, on any machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed as dist

from horovod.core.requests import ReduceOp
from horovod.links.shm import link
from horovod.torch.adapter import TorchAdapter
from horovod.transports.on_device import DeviceTransport
from horovod.transports.torch_dist import TorchGroups, listen

NAME = "paper"
_OPS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}


class _Passed:
    """See ``Passed``."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self.buffers = buffers
        self._events: list[str] = []

    def begin(self) -> None:
        self._events.append("begin")

    def before(self) -> None:
        assert self._events == ["begin"]
        self._events.append("before")

    def after(self, outputs: Sequence[torch.Tensor]) -> None:
        assert self._events == ["begin", "before"]
        self._results = list(outputs)

    def collect(self) -> list[torch.Tensor]:
        return self._results


class _Stage(_Passed):
    """See ``Stage``."""

    def __init__(self, tensors: Sequence[torch.Tensor], targets: Sequence[torch.Tensor] | None) -> None:
        super().__init__([tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors])
        self._events.append("begin")
        self._targets = targets

    def after(self, outputs: Sequence[torch.Tensor]) -> None:
        super().after(outputs)
        if self._targets is not None:
            self._results = [target.copy_(output) for target, output in zip(self._targets, outputs, strict=True)]


class PaperAdapter(TorchAdapter):
    """Every tensor is one of the device."""

    def buffer(self, tensor: Any) -> None:
        """Return None: it is not in host memory."""

    def device(self, tensor: torch.Tensor) -> str:
        """Return the device's name."""
        return f"{NAME}:0"

    def stage(self, tensors: Sequence[torch.Tensor], targets: Sequence[torch.Tensor] | None) -> Any:
        """Copy what the transport does not take where it is."""
        assert not all(tensor.dtype is torch.float32 for tensor in tensors), "this is taken"
        return _Stage(tensors, targets)

    def passed(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Hand tensors over."""
        return _Passed([t.detach() if t.is_contiguous() else self.contiguous(t) for t in tensors])


class _Group:
    """See ``NcclGroup``; each operation is over when it returns."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def reduce(self, tensors: Sequence[torch.Tensor], op: ReduceOp) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]
        for tensor in tensors:
            self._group.allreduce([tensor], options).wait()

    def reduce_scatter(self, part: torch.Tensor, whole: torch.Tensor, op: ReduceOp) -> None:
        every = whole.clone()
        self.reduce([every], op)
        start = self._group.rank() * part.numel()
        part.copy_(every[start : start + part.numel()])

    def gather(self, part: torch.Tensor, whole: torch.Tensor, counts: Sequence[int]) -> None:
        start = 0
        for root, count in enumerate(counts):
            if root == self._group.rank():
                whole[start : start + count] = part
            self.broadcast(whole[start : start + count], root)
            start += count

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self._group.broadcast([tensor], options).wait()

    def exchange(
        self, send: torch.Tensor, send_counts: Sequence[int], receive: torch.Tensor, receive_counts: Sequence[int]
    ) -> None:
        self._group.alltoall_base(receive, send, list(receive_counts), list(send_counts)).wait()

    def wait(self) -> None: ...


class _Groups:
    """See ``NcclGroups``."""

    name = "gloo"

    def __init__(self, groups: TorchGroups) -> None:
        self._groups = groups
        self.close = groups.close

    def group(self, ranks: Sequence[int], device: torch.device) -> _Group:
        return _Group(self._groups.group(ranks)._group)  # type: ignore[attr-defined]


def on_paper(init: Callable[[], None]) -> None:
    """Call ``init`` as a rank whose transport takes tensors of the device."""
    usual = link.make_transport

    def make(settings: Any, launcher: str, topology: Any, shm: Any, open_store: Any, watch: Any) -> DeviceTransport:
        inner = usual(settings, launcher, topology, shm, open_store, watch)
        groups = TorchGroups(topology.rank, open_store(), watch, 60.0, listen())
        return DeviceTransport(inner, _Groups(groups), NAME)  # type: ignore[arg-type]

    link.make_transport = make
    try:
        init()
    finally:
        link.make_transport = usual
