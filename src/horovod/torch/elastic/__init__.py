"""Elastic training with PyTorch: ``import horovod.torch as hvd``, then ``hvd.elastic.run``; see docs/elastic.md."""

from horovod.bindings.elastic import common_names
from horovod.bindings.elastic.common_names import *  # noqa: F403 - all of it, by its own list
from horovod.bindings.elastic.run import run
from horovod.bindings.elastic.shard import shard
from horovod.bindings.elastic.step import step
from horovod.torch.elastic import state
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import *  # noqa: F403 - all of it, by its own list

__all__ = ["ElasticSampler", "run", "shard", "step"]
__all__ += common_names.__all__
__all__ += state.__all__
