"""The common part of ``horovod.keras`` and ``horovod.tensorflow.keras``; loads no Keras, and one backend at most.

settings            the arguments of DistributedOptimizer
reduction           how the gradients of one optimizer are combined
members, layers     what makes an optimizer of Keras 3 a distributed one; layers that each rank has for itself
callbacks, public   what the callbacks do; their classes for each Keras
model_state, elastic_*  training that goes on when ranks come and go
values, saving      collectives on values; ``load_model``
backends            the backend of Keras; on_tensorflow, on_torch and on_jax are the ones there are
"""
