"""Where operations are placed."""

from __future__ import annotations

from khorovod_ipu.tensorflow.programs import ipu_scope
from khorovod_ipu.tensorflow.settings import ipu_shard, outside_compilation_scope

__all__ = ["ipu_scope", "ipu_shard", "outside_compilation_scope"]
