"""Place of the module for TensorFlow; importing it says that it is not there."""

from __future__ import annotations

from horovod.bindings.later import explain

raise ImportError(explain("tensorflow"), name=__name__)
