"""Elastic training with PyTorch: ``import horovod.torch as hvd``, then ``hvd.elastic.run``; see docs/elastic.md."""

from horovod.bindings.elastic.leave import on_leave
from horovod.bindings.elastic.rates import LearningRateScale, passes_for
from horovod.bindings.elastic.run import run
from horovod.bindings.elastic.shard import shard
from horovod.bindings.elastic.state import ObjectState, State
from horovod.bindings.elastic.step import step
from horovod.torch.elastic.handlers import (
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateHandler,
    get_handler_registry,
    set_handler_registry,
)
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import TorchState

__all__ = [
    "ElasticSampler",
    "LearningRateScale",
    "ModelStateHandler",
    "ObjectState",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "State",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "on_leave",
    "passes_for",
    "run",
    "set_handler_registry",
    "shard",
    "step",
]
