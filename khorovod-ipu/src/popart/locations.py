"""``TensorLocation`` and ``TensorLocationSettings``: kept, without effect."""

from __future__ import annotations

from dataclasses import dataclass

from popart.enums import ReplicatedTensorSharding, TensorStorage, TileSet

__all__ = ["TensorLocation", "TensorLocationSettings"]


@dataclass
class TensorLocation:
    """Location of a tensor; the software device has only one memory.

    Attributes:
        storage: the memory.
        loadTileSet: tiles that use it.
        storageTileSet: tiles that keep it.
        replicatedTensorSharding: whether the tensor is sharded among replicas.
    """

    storage: TensorStorage = TensorStorage.OnChip
    loadTileSet: TileSet = TileSet.Compute
    storageTileSet: TileSet = TileSet.Compute
    replicatedTensorSharding: ReplicatedTensorSharding = ReplicatedTensorSharding.Off


@dataclass
class TensorLocationSettings:
    """Locations for a kind of tensors, as in ``SessionOptions.weightTensorLocationSettings``.

    Attributes:
        location: the location, or its memory.
        minElementsForOffChip: smaller tensors stay on the chip.
        minElementsForReplicatedTensorSharding: smaller tensors are not sharded.
    """

    location: TensorLocation | TensorStorage | None = None
    minElementsForOffChip: int = 2
    minElementsForReplicatedTensorSharding: int = 8192

    def __post_init__(self) -> None:
        if not isinstance(self.location, TensorLocation):
            self.location = TensorLocation(self.location or TensorStorage.OnChip)
