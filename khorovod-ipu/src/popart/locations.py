"""``TensorLocation`` and ``TensorLocationSettings``: kept, without effect."""

from __future__ import annotations

from dataclasses import dataclass

from popart.enums import ReplicatedTensorSharding, TensorStorage, TileSet

__all__ = ["TensorLocation", "TensorLocationSettings"]


@dataclass
class TensorLocation:
    """A place for a tensor; the software device has one memory.

    Attributes:
        storage: which memory.
        loadTileSet: tiles that use it.
        storageTileSet: tiles that keep it.
        replicatedTensorSharding: whether replicas share it out.
    """

    storage: TensorStorage = TensorStorage.OnChip
    loadTileSet: TileSet = TileSet.Compute
    storageTileSet: TileSet = TileSet.Compute
    replicatedTensorSharding: ReplicatedTensorSharding = ReplicatedTensorSharding.Off


@dataclass
class TensorLocationSettings:
    """Places for a kind of tensors, as in ``SessionOptions.weightTensorLocationSettings``.

    Attributes:
        location: the place, or its memory.
        minElementsForOffChip: smaller tensors stay on the chip.
        minElementsForReplicatedTensorSharding: smaller tensors are not shared out.
    """

    location: TensorLocation | TensorStorage | None = None
    minElementsForOffChip: int = 2
    minElementsForReplicatedTensorSharding: int = 8192

    def __post_init__(self) -> None:
        if not isinstance(self.location, TensorLocation):
            self.location = TensorLocation(self.location or TensorStorage.OnChip)
