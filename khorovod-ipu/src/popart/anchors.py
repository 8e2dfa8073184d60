"""Values of anchors that a run returns."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from popart.dataflow import DataFlow
from popart.enums import AnchorReturnTypeId
from popart.stepio import Factors, StepIO
from popart.tensors import Array, TensorInfo, to_numpy

__all__ = ["Anchors", "anchor_infos"]

#: The types that return one value per replica and run.
_ONE_EACH = (AnchorReturnTypeId.Final, AnchorReturnTypeId.Sum)


def anchor_infos(flow: DataFlow, infos: Mapping[str, TensorInfo], factors: Factors) -> dict[str, TensorInfo]:
    """Return dtype and shape of the array for each anchor; dimensions of 1 before the tensor's own are dropped."""
    found = {}
    for name in flow.anchors():
        kind, info, leading = flow.art(name), infos[name], [factors.replicas]
        if kind.id() not in _ONE_EACH:
            period = kind.rp() if kind.id() is AnchorReturnTypeId.EveryN else 1
            leading = [factors.batches // period, factors.accumulation, factors.replicas]
        found[name] = TensorInfo(info.data_type(), [*(count for count in leading if count > 1), *info.shape()])
    return found


class Anchors:
    """Collects the values of one run, micro-batch by micro-batch.

    Args:
        flow: the anchors, and the selection of their values.
        factors: numbers of micro-batches.
        target: receives the values.
    """

    def __init__(self, flow: DataFlow, factors: Factors, target: StepIO) -> None:
        self._flow, self._factors, self._target = flow, factors, target
        self._sums: dict[tuple[str, int], Array] = {}

    def take(self, batch: int, accumulated: int, replica: int, values: Mapping[str, torch.Tensor]) -> None:
        """Take the values of one micro-batch."""
        last = accumulated == self._factors.accumulation - 1 and batch == self._factors.batches - 1
        for name in self._flow.anchors():
            kind, value = self._flow.art(name), to_numpy(values[name])
            at_end = kind.id() in _ONE_EACH
            wanted = last if at_end else kind.id() is AnchorReturnTypeId.All or (batch + 1) % kind.rp() == 0
            if kind.id() is AnchorReturnTypeId.Sum:
                value = np.add(self._sums.get((name, replica), np.zeros_like(value)), value)
                self._sums[name, replica] = value
            if wanted:
                self._target.give(name, value)
