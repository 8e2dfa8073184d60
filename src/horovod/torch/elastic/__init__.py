"""Elastic training with PyTorch: ``import horovod.torch as hvd``, then ``hvd.elastic.run``; see docs/elastic.md."""

from horovod.bindings.elastic.leave import on_leave
from horovod.bindings.elastic.rates import LearningRateScale, passes_for
from horovod.bindings.elastic.run import run
from horovod.bindings.elastic.shard import shard
from horovod.bindings.elastic.state import ObjectState, State
from horovod.bindings.elastic.step import step
from horovod.torch.elastic import state
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import *  # noqa: F403 - all of it, by its own list

__all__ = [
    "ElasticSampler",
    "LearningRateScale",
    "ObjectState",
    "State",
    "on_leave",
    "passes_for",
    "run",
    "shard",
    "step",
]
__all__ += state.__all__
