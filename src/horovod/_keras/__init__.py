"""Shared code of ``horovod.keras`` and ``horovod.tensorflow.keras``; loads no Keras, and at most one backend.

settings            the arguments of DistributedOptimizer
reduction           combination of one optimizer's gradients over the ranks
members             methods of distributed Keras 3 optimizers
callbacks           code of the callbacks
model_state, elastic_*  training that continues when ranks are lost or join
values              collectives on values
public              what each Keras has of its own: classes of callbacks and states, local layers, ``load_model``
backends            interface of a Keras backend; on_tensorflow, on_torch and on_jax implement it
"""
