"""Placeholder of the module for MXNet; its import raises an error that says why it is missing."""

from __future__ import annotations

raise ImportError("horovod.mxnet belongs to MXNet, which is retired: khorovod does not have it", name=__name__)
