"""Place of the module for JAX; importing it says that it is not there."""

from __future__ import annotations

from horovod.bindings.later import explain

raise ImportError(explain("jax"), name=__name__)
