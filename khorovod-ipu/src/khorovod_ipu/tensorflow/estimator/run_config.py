"""The configuration of an IPUEstimator."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from khorovod_ipu.tensorflow.options import IPUConfig

__all__ = ["IPURunConfig", "RunConfig"]

_UNLESS_STEPS: Any = object()


@dataclass(frozen=True)
class IPURunConfig:
    """Settings of the device.

    Attributes:
        iterations_per_loop: number of steps between two calls of hooks.
        ipu_options: options from ``ipu.utils``, or an ``IPUConfig``; refused if they would change results.
        compile_summary: accepted; nothing is compiled.
        num_replicas: accepted if it is 1 or the instance's number of replicas, which PopDistStrategy determines.
        num_shards: number of devices per replica; accepted, because it changes no result.
        ordinal: index of the device on the host; all devices are software.
        prefetch_depth: number of batches to prepare ahead.
    """

    iterations_per_loop: int = 1
    ipu_options: Any = None
    compile_summary: bool = False
    num_replicas: int = 1
    num_shards: int = 1
    ordinal: int = 0
    prefetch_depth: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.iterations_per_loop, int) or self.iterations_per_loop < 1:
            raise ValueError(f"iterations_per_loop must be a positive number. Received: {self.iterations_per_loop!r}")
        if not isinstance(self.num_shards, int) or self.num_shards < 1:
            raise ValueError(f"num_shards must be a positive number. Received: {self.num_shards!r}")
        if isinstance(self.ipu_options, IPUConfig):
            self.ipu_options.configure_ipu_system()


@dataclass(frozen=True)
class RunConfig:
    """``tf.estimator.RunConfig``, with settings of the device.

    Attributes:
        ipu_run_config: settings of the device.
        master: target of the session; a strategy over gRPC has its own.
        model_dir: folder of checkpoints and summaries; None creates a temporary folder.
        tf_random_seed: random seed of the graph.
        save_summary_steps: steps between two summaries; None writes none.
        save_checkpoints_steps: steps between two checkpoints.
        save_checkpoints_secs: seconds between two checkpoints, 600 if neither is given; None for both writes none.
        session_config: a ``tf.compat.v1.ConfigProto``.
        keep_checkpoint_max: maximum number of checkpoints to keep.
        keep_checkpoint_every_n_hours: one checkpoint per this many hours is kept for ever.
        log_step_count_steps: steps between two lines of the log.
        train_distribute: strategy for training.
        eval_distribute: accepted if it is None: worker 0 alone evaluates all the data.
        protocol: accepted and ignored: TF_CONFIG defines it.
        device_fn: accepted.
        experimental_distribute: accepted if it is None: ``train_distribute`` is the strategy.
        experimental_max_worker_delay_secs: accepted.
        session_creation_timeout_secs: accepted.
        checkpoint_save_graph_def: accepted.
    """

    ipu_run_config: IPURunConfig | None = field(default_factory=IPURunConfig)
    master: str | None = None
    model_dir: str | None = None
    tf_random_seed: int | None = None
    save_summary_steps: int | None = 100
    save_checkpoints_steps: int | None = None
    save_checkpoints_secs: int | None = _UNLESS_STEPS
    session_config: Any = None
    keep_checkpoint_max: int = 5
    keep_checkpoint_every_n_hours: float = 10000
    log_step_count_steps: int | None = 100
    train_distribute: Any = None
    eval_distribute: Any = None
    protocol: str | None = None
    device_fn: Any = None
    experimental_distribute: Any = None
    experimental_max_worker_delay_secs: Any = None
    session_creation_timeout_secs: int = 7200
    checkpoint_save_graph_def: bool = True

    def __post_init__(self) -> None:
        if self.ipu_run_config is None:
            object.__setattr__(self, "ipu_run_config", IPURunConfig())
        if self.save_checkpoints_secs is _UNLESS_STEPS:
            object.__setattr__(self, "save_checkpoints_secs", None if self.save_checkpoints_steps else 600)
        if self.save_checkpoints_steps and self.save_checkpoints_secs:
            raise ValueError("give save_checkpoints_steps or save_checkpoints_secs, not both")
        if self.eval_distribute is not None:
            raise NotImplementedError("evaluation is not distributed: every worker that calls evaluate() does it alone")
        if self.experimental_distribute is not None:
            raise NotImplementedError("experimental_distribute is not imitated: give the strategy as train_distribute")
        replicas = 1 if self.train_distribute is None else len(self.train_distribute.extended.worker_devices)
        if self.device.num_replicas not in (1, replicas):
            raise NotImplementedError(
                f"this worker has {replicas} replicas, by its strategy. Received: num_replicas="
                f"{self.device.num_replicas}; start more workers, or train with PopDistStrategy under poprun "
                "--num-replicas"
            )

    @property
    def device(self) -> IPURunConfig:
        """Settings of the device."""
        assert self.ipu_run_config is not None
        return self.ipu_run_config

    @property
    def num_worker_replicas(self) -> int:
        """Number of training replicas, of all workers together."""
        return 1 if self.train_distribute is None else int(self.train_distribute.num_replicas_in_sync)

    @property
    def is_chief(self) -> bool:
        """Whether this is worker 0."""
        return self.train_distribute is None or bool(self.train_distribute.extended.should_checkpoint)

    def replace(self, **changes: Any) -> RunConfig:
        """Return a copy with some values changed.

        Args:
            changes: new values by name.
        """
        return replace(self, **changes)
