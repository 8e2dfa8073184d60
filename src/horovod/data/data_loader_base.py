"""The import path of Horovod's scripts; the classes live in ``horovod.data.loader``."""

from horovod.data.loader import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
