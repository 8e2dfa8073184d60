"""Code that all frameworks share: collectives, process sets, objects and gradient buckets over an ``Adapter``.

A binding such as ``horovod.torch`` provides an adapter and holds only framework-specific code.
"""
