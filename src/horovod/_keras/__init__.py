"""Shared code of ``horovod.keras`` and ``horovod.tensorflow.keras``; loads no Keras, and at most one backend.

settings            the arguments of DistributedOptimizer
reduction           combination of one optimizer's gradients over the ranks
members, layers     methods of distributed Keras 3 optimizers; layers that each rank trains locally
callbacks, public   code of the callbacks; their public classes for each Keras
model_state, elastic_*  training that continues when ranks are lost or join
values, saving      collectives on values; ``load_model``
backends            interface of a Keras backend; on_tensorflow, on_torch and on_jax implement it
"""
