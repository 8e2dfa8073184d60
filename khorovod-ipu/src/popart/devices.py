"""Devices: each one is the software device."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from popart.enums import DeviceConnectionType, DeviceType, SyncPattern
from popart.errors import popart_exception

__all__ = ["DeviceInfo", "DeviceManager"]

_ids = itertools.count()
#: Number of tiles of an IPU of the second generation.
_TILES = 1472


class DeviceInfo:
    """A software device; detached at the end of a ``with`` block.

    Args:
        kind: type of the device.
        ipus: number of IPUs that it represents.
        tiles: number of tiles per IPU.

    Attributes:
        type: type of the device.
        id: its number in this process.
        numIpus: number of IPUs that it represents.
        tilesPerIPU: the requested number; without effect.
        isAttached: whether a session may use it.
    """

    def __init__(self, kind: DeviceType, ipus: int = 1, tiles: int = _TILES) -> None:
        if ipus < 1:
            raise popart_exception(f"a device has at least one IPU; received {ipus}")
        self.type, self.id, self.numIpus, self.tilesPerIPU = kind, next(_ids), int(ipus), int(tiles)
        self.isAttached = True
        self.connectionType = DeviceConnectionType.Always

    def attach(self) -> bool:
        """Attach; always succeeds immediately."""
        self.isAttached = True
        return True

    tryAttachUntilTimeout = attach

    def detach(self) -> None:
        """Detach; sessions can no longer run on it."""
        self.isAttached = False

    def __enter__(self) -> DeviceInfo:
        self.attach()
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        return f"<software device {self.id}: {self.type.name}, {self.numIpus} IPU>"


def _creating(kind: DeviceType) -> Any:
    """Return a method that returns a device of a kind, which can run whatever the kind is."""

    def create(self: DeviceManager, options: Mapping[str, Any] | None = None) -> DeviceInfo:
        given = options or {}
        return DeviceInfo(kind, int(given.get("numIPUs", 1)), int(given.get("tilesPerIPU", _TILES)))

    create.__doc__ = f"Return a device of type {kind.name}; ``options`` are numIPUs, tilesPerIPU, and ineffective ones."
    return create


class DeviceManager:
    """Creates any number of devices."""

    def createCpuDevice(self) -> DeviceInfo:
        """Return a device of type CPU."""
        return DeviceInfo(DeviceType.Cpu)

    createIpuModelDevice = _creating(DeviceType.IpuModel)
    createSimDevice = _creating(DeviceType.Sim)
    createOfflineIPUDevice = _creating(DeviceType.OfflineIpu)

    def acquireAvailableDevice(
        self,
        numIpus: int = 1,
        tilesPerIpu: int = 0,
        pattern: SyncPattern = SyncPattern.Full,
        connectionType: DeviceConnectionType = DeviceConnectionType.Always,
        selectionCriterion: Any = None,
    ) -> DeviceInfo:
        """Return a device; one is always available.

        Args:
            numIpus: number of IPUs that it represents.
            tilesPerIpu: accepted.
            pattern: accepted.
            connectionType: stored without effect.
            selectionCriterion: accepted.
        """
        device = DeviceInfo(DeviceType.Ipu, numIpus, tilesPerIpu or _TILES)
        device.connectionType = connectionType
        return device

    def acquireDeviceById(self, id: int, *arguments: Any, **named: Any) -> DeviceInfo:
        """Return a device with this number; the other arguments are ``pattern`` and those after it."""
        device = self.acquireAvailableDevice(1, 0, *arguments, **named)
        device.id = id
        return device

    def enumerateDevices(self, *arguments: Any, **named: Any) -> list[DeviceInfo]:
        """Return one device; all arguments are accepted."""
        return [DeviceInfo(DeviceType.Ipu)]

    def setOnDemandAttachTimeout(self, seconds: int) -> None:
        """Accept a timeout without effect: a device is always available."""
