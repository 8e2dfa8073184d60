"""The configuration of the device: kept, without effect on a software device."""

from __future__ import annotations

from typing import Any

__all__ = ["IPUConfig", "OptionTree"]

#: Known groups of options; below these names every option is accepted.
_NAMES = frozenset(
    (
        "allow_recompute", "auto_select_ipus", "select_ipus", "compilation_options", "convolutions",
        "device_connection", "experimental", "floating_point_behaviour", "gcl_poplar_options", "indices", "io_tiles",
        "ipu_model", "matmuls", "norms", "num_ipus", "optimizations", "pooling", "scheduling", "selection_order",
        "serialization_output_folder", "slices", "verified_transfers",
    )
)  # fmt: skip


class OptionTree:
    """A tree of options; reading an unset name returns a subtree."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = OptionTree()
        object.__setattr__(self, name, value)
        return value

    def __bool__(self) -> bool:
        return bool(vars(self))


class IPUConfig(OptionTree):
    """``ipu.config.IPUConfig``: the SDK's options may be set."""

    def __getattr__(self, name: str) -> Any:
        self._check(name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._check(name)
        object.__setattr__(self, name, value)

    @staticmethod
    def _check(name: str) -> None:
        if name not in _NAMES:
            raise AttributeError(f"IPUConfig has no option {name!r}; it has {', '.join(sorted(_NAMES))}")

    def configure_ipu_system(self, device: str = "cpu") -> None:
        """Raise ``NotImplementedError`` if an option would change results; else do nothing."""
        name = "distributed_batch_norm_replica_group_size"
        older = getattr(self.compilation_options.norm_options, f"experimental_{name}")
        for size in (getattr(self.norms.experimental, name), older):
            if size and size != 1:
                raise NotImplementedError(f"{name}={size!r}: each replica has its own statistics")
