"""Placeholder of the module for MXNet; its import raises an error that says why it is missing."""

raise ImportError("horovod.mxnet belongs to MXNet, which is retired: khorovod does not have it", name=__name__)
