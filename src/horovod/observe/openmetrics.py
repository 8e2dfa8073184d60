"""The numbers of ``hvd.stats()`` as OpenMetrics text, for Prometheus and others.

Source: OpenMetrics 1.0, https://prometheus.io/docs/specs/om/open_metrics_spec/.
"""

from __future__ import annotations

from collections.abc import Mapping

from horovod.engine.stats import Stats

__all__ = ["CONTENT_TYPE", "render"]

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def render(stats: Stats, labels: Mapping[str, str], size: int) -> str:
    """Return one exposition of the metrics."""
    kinds = stats.kinds.items()
    families: list[tuple[str, str, str, str, list[tuple[str, float]]]] = [
        ("horovod_operations", "counter", "", "Operations that this rank has submitted.",
         [(kind, usage.operations) for kind, usage in kinds]),
        ("horovod_tensor_bytes", "counter", "bytes", "Size of its tensors in them.",
         [(kind, usage.bytes) for kind, usage in kinds]),
        ("horovod_operations_in_flight", "gauge", "", "Operations that are not done.", [("", stats.in_flight)]),
        ("horovod_fused_operations", "counter", "", "Operations executed together with others.", [("", stats.fused)]),
        ("horovod_fusions", "counter", "", "Executions that these took.", [("", stats.fusions)]),
        ("horovod_waits", "counter", "", "Times that a thread had to wait for an operation.", [("", stats.waits)]),
        ("horovod_wait_seconds", "counter", "seconds", "Time that threads have waited.", [("", stats.wait_s)]),
        ("horovod_elapsed_seconds", "gauge", "seconds", "Time since init().", [("", stats.elapsed_s)]),
        ("horovod_resets", "counter", "", "Changes of the members of an elastic job.", [("", stats.resets)]),
        ("horovod_ranks", "gauge", "", "Ranks of the job.", [("", size)]),
    ]  # fmt: skip
    lines = []
    for name, kind, unit, text, samples in families:
        lines.append(f"# TYPE {name} {kind}")
        lines += [f"# UNIT {name} {unit}"] if unit else []
        lines.append(f"# HELP {name} {text}")
        sample = f"{name}_total" if kind == "counter" else name
        for operation, value in samples:
            own = {**labels, "kind": operation} if operation else labels
            lines.append(f"{sample}{{{_text(own)}}} {value:.17g}")
    return "\n".join([*lines, "# EOF\n"])


def _text(labels: Mapping[str, str]) -> str:
    escapes = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
    return ",".join(f'{name}="{value.translate(escapes)}"' for name, value in labels.items())
