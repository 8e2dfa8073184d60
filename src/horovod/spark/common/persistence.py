"""Spark ML's save and load for estimators and models.

JSON-compatible parameters go to Spark ML's metadata, the others to one Parquet file with their bytes. Loading runs
code from that file, as unpickling does.
"""

from __future__ import annotations

import json
import posixpath
from typing import Any

import cloudpickle
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReadable, MLReader, MLWritable, MLWriter

from horovod.spark.common.store import Store

__all__ = ["Saved"]

_OBJECTS = "objects"


class Saved(MLWritable, MLReadable):
    """Mixin for classes that Spark ML saves and loads, alone or in a pipeline."""

    def write(self) -> Any:
        """Return Spark ML's writer."""
        return _Writer(self)

    @classmethod
    def read(cls) -> Any:
        """Return Spark ML's reader; it unpickles, so load only trusted files."""
        return _Reader(cls)

    @staticmethod
    def _pack(objects: dict[str, Any]) -> bytes:
        """Pickle values together, so that a model and its optimizer keep sharing parameters."""
        return bytes(cloudpickle.dumps(objects))

    @staticmethod
    def _unpack(packed: bytes) -> dict[str, Any]:
        """Reverse ``_pack``."""
        objects: dict[str, Any] = cloudpickle.loads(packed)
        return objects


class _Writer(MLWriter):
    def __init__(self, instance: Any) -> None:
        super().__init__()
        self.instance = instance

    def saveImpl(self, path: str) -> None:  # noqa: N802 - Spark's name
        plain: dict[str, Any] = {}
        objects: dict[str, Any] = {}
        for param, value in self.instance._paramMap.items():
            value = value.without_options() if isinstance(value, Store) else value
            (plain if _is_plain(value) else objects)[param.name] = value
        DefaultParamsWriter.saveMetadata(self.instance, path, self.sparkSession.sparkContext, paramMap=plain)
        row = (bytearray(self.instance._pack(objects)),)
        frame = self.sparkSession.createDataFrame([row], "packed binary")
        frame.coalesce(1).write.parquet(posixpath.join(path, _OBJECTS))


class _Reader(MLReader):
    def __init__(self, cls: Any) -> None:
        super().__init__()
        self.cls = cls

    def load(self, path: str) -> Any:
        metadata = DefaultParamsReader.loadMetadata(
            path, self.sparkSession.sparkContext, f"{self.cls.__module__}.{self.cls.__name__}"
        )
        instance = self.cls()
        instance._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(instance, metadata)
        row = self.sparkSession.read.parquet(posixpath.join(path, _OBJECTS)).first()
        return instance._set(**instance._unpack(bytes(row.packed)))


def _is_plain(value: Any) -> bool:
    if value is None:  # Spark's reader gives it to the parameter's converter, which refuses it
        return False
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False
