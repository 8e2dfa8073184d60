"""Code that all frameworks share: collectives, process sets, objects and gradient buckets over an ``Adapter``.

A binding such as ``horovod.torch`` gives an adapter, and holds only what is truly its framework's.
"""
