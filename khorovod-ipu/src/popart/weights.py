"""Two copies of weights, as in PopART: on the host, for reading, writing and saving, and on the device."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper

from popart.errors import popart_exception, unknown
from popart.model import load_proto
from popart.stepio import PyWeightsIO
from popart.tensors import Array, to_numpy
from popart.updates import STATE

__all__ = ["Weights"]


class Weights:
    """All weights of a session; a ``popart_exception`` names a weight that does not exist or does not fit.

    Args:
        model: source model of the weights.
        initial: initial values.
        trained: ids of the weights that the optimizer changes.

    Attributes:
        host: the values on the host, by id.
        device: the tensors on the device, by id.
        uploaded: whether the device has values.
        written: whether the host got values from elsewhere, until a session of several processes has compared them.
    """

    def __init__(self, model: Any, initial: Mapping[str, Array], trained: Iterable[str]) -> None:
        self._proto = load_proto(model)
        self.host = {name: np.array(array, order="C") for name, array in initial.items()}
        self.device = {name: torch.from_numpy(array.copy()) for name, array in self.host.items()}
        for name in trained:
            self.device[name].requires_grad_(True)
        self.uploaded, self.written = False, True

    def add(self, name: str, array: Array) -> None:
        """Take a tensor that is not trained, unless it exists: a part of the optimizer's state."""
        self.host.setdefault(name, array)
        self.device.setdefault(name, torch.from_numpy(self.host[name].copy()))

    @torch.no_grad()
    def upload(self) -> None:
        """Copy the host's values to the device."""
        for name, tensor in self.device.items():
            tensor.copy_(torch.from_numpy(self.host[name]))
        self.uploaded = True

    def download(self) -> None:
        """Copy the device's values to the host, if it has any."""
        if self.uploaded:
            for name, tensor in self.device.items():
                np.copyto(self.host[name], tensor.detach().numpy())

    def read(self, into: PyWeightsIO) -> None:
        """Copy the host's values into arrays."""
        for name, array in into.weights.items():
            np.copyto(array, self._fitting(name, array))

    def write(self, source: PyWeightsIO) -> None:
        """Copy arrays over the host's values."""
        self.written = True
        fitting = {name: self._fitting(name, array) for name, array in source.weights.items()}
        for name, array in source.weights.items():
            np.copyto(fitting[name], array)

    def checksum(self) -> str:
        """Return a checksum of the device's trained weights and of the optimizer's state."""
        kept = [own for name, own in self.device.items() if own.requires_grad or name.startswith(STATE)]
        return str(functools.reduce(lambda value, own: zlib.crc32(to_numpy(own).tobytes(), value), kept, 0))

    def save(self, filename: str) -> None:
        """Write the model with the present values: those of the device, if it has values."""
        self.download()
        model = onnx.ModelProto()
        model.CopyFrom(self._proto)
        del model.graph.initializer[:]
        model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in self.host.items())
        Path(filename).write_bytes(model.SerializeToString())

    def reset(self, model: Any, ignore_others: bool) -> None:
        """Replace the host's values by those of another model with the same weights; it may have an optimizer's state.

        Args:
            model: the other model's bytes, or a file's name.
            ignore_others: whether it may have weights that this session lacks.

        Raises:
            popart_exception: a weight is missing, does not fit, or is unknown here without ``ignore_others``.
        """
        given = {tensor.name: numpy_helper.to_array(tensor) for tensor in load_proto(model).graph.initializer}
        host = {name: array for name, array in self.host.items() if name in given or not name.startswith(STATE)}
        if missing := sorted(host.keys() - given.keys()):
            raise popart_exception(f"the model does not have the weights {', '.join(missing)}")
        if not ignore_others and (strange := sorted(n for n in given.keys() - host.keys() if not n.startswith(STATE))):
            raise popart_exception(
                f"the model has weights that this session does not use: {', '.join(strange)}. "
                "ignoreWeightsInModelWithoutCorrespondingHostWeight=True passes over them"
            )
        self.write(PyWeightsIO({name: np.array(given[name], order="C") for name in host}))

    def _fitting(self, name: str, array: Array) -> Array:
        if name not in self.host:
            raise unknown("a weight of this session", name, self.host)
        own = self.host[name]
        if own.shape != array.shape or own.dtype != array.dtype:
            raise popart_exception(
                f"the weight {name!r} is {own.dtype} {list(own.shape)}; received {array.dtype} {list(array.shape)}"
            )
        return own
