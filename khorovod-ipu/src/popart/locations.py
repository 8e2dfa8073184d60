"""``TensorLocation`` and ``TensorLocationSettings``: kept, without effect."""

from __future__ import annotations

from popart.enums import ReplicatedTensorSharding, TensorStorage, TileSet

__all__ = ["TensorLocation", "TensorLocationSettings"]


class TensorLocation:
    """A place for a tensor; the software device has one memory.

    Args:
        storage: which memory.
        loadTileSet: tiles that use it.
        storageTileSet: tiles that keep it.
        replicatedTensorSharding: whether replicas share it out.
    """

    def __init__(
        self,
        storage: TensorStorage = TensorStorage.OnChip,
        loadTileSet: TileSet = TileSet.Compute,
        storageTileSet: TileSet = TileSet.Compute,
        replicatedTensorSharding: ReplicatedTensorSharding = ReplicatedTensorSharding.Off,
    ) -> None:
        self.storage, self.loadTileSet, self.storageTileSet = storage, loadTileSet, storageTileSet
        self.replicatedTensorSharding = replicatedTensorSharding


class TensorLocationSettings:
    """Places for a kind of tensors, as in ``SessionOptions.weightTensorLocationSettings``.

    Args:
        location: the place, or its memory.
        minElementsForOffChip: smaller tensors stay on the chip.
        minElementsForReplicatedTensorSharding: smaller tensors are not shared out.
    """

    def __init__(
        self,
        location: TensorLocation | TensorStorage | None = None,
        minElementsForOffChip: int = 2,
        minElementsForReplicatedTensorSharding: int = 8192,
    ) -> None:
        known = isinstance(location, TensorLocation)
        self.location = location if known else TensorLocation(location or TensorStorage.OnChip)  # type: ignore[arg-type]
        self.minElementsForOffChip = minElementsForOffChip
        self.minElementsForReplicatedTensorSharding = minElementsForReplicatedTensorSharding
