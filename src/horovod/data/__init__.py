"""Data loaders that prepare the next batches while the current one is trained on."""

from horovod.data.loader import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
