"""Place of Horovod's module of this name; importing it says that it is not there yet."""

from __future__ import annotations

from horovod.bindings.missing import explain

raise ImportError(explain("tensorflow.elastic"), name=__name__)
