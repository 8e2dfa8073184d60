"""Exporters of an EvalSpec: the last model, the latest ones, the best ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["BestExporter", "Exporter", "FinalExporter", "LatestExporter", "checked", "lower_loss"]

#: Beside the models of a BestExporter: how good the best one was, so that a job that resumes knows it.
_BEST = "best.json"


class Exporter:
    """Exports a model after an evaluation; the base of an exporter of one's own.

    Args:
        name: of the folder inside ``model_dir/export``.
        serving_input_receiver_fn: of ``export_saved_model``.
        assets_extra: of ``export_saved_model``.
        as_text: of ``export_saved_model``.
    """

    def __init__(
        self,
        name: str,
        serving_input_receiver_fn: Callable[[], Any] | None = None,
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
    ) -> None:
        if not name:
            raise ValueError("an exporter needs a name")
        self.name = name
        self._receive, self._assets, self._as_text = serving_input_receiver_fn, assets_extra, as_text

    def export(
        self,
        estimator: Any,
        export_path: str,
        checkpoint_path: str,
        eval_result: Mapping[str, Any],
        is_the_final_export: bool,
    ) -> Any:
        """Export the model of a checkpoint, if it is due, and return where it is, or None.

        Args:
            estimator: that runs it.
            export_path: the folder of this exporter.
            checkpoint_path: what was evaluated.
            eval_result: the metrics.
            is_the_final_export: whether training has ended.
        """
        if not self._is_due(Path(export_path), eval_result, is_the_final_export):
            return None
        made = estimator.export_saved_model(
            export_path, self._receive, self._assets, self._as_text, checkpoint_path=checkpoint_path
        )
        self._has_exported(Path(export_path), eval_result)
        return made

    def _is_due(self, folder: Path, result: Mapping[str, Any], is_final: bool) -> bool:
        return True

    def _has_exported(self, folder: Path, result: Mapping[str, Any]) -> None:
        """Do nothing more."""


class FinalExporter(Exporter):
    """Exports once, when training has ended."""

    def _is_due(self, folder: Path, result: Mapping[str, Any], is_final: bool) -> bool:
        return is_final


class LatestExporter(Exporter):
    """Exports after every evaluation, and keeps the newest.

    Args:
        *given: of ``Exporter``.
        exports_to_keep: how many; None keeps all.
        **named: of ``Exporter``.
    """

    def __init__(self, *given: Any, exports_to_keep: int | None = 5, **named: Any) -> None:
        super().__init__(*given, **named)
        if exports_to_keep is not None and exports_to_keep <= 0:
            raise ValueError(f"exports_to_keep must be a positive number. Received: {exports_to_keep}")
        self._kept = exports_to_keep

    def _has_exported(self, folder: Path, result: Mapping[str, Any]) -> None:
        if self._kept is not None:
            there = sorted((each for each in folder.iterdir() if each.name.isdigit()), key=lambda p: int(p.name))
            for old in there[: -self._kept]:
                shutil.rmtree(old)


def lower_loss(best_eval_result: Mapping[str, Any], current_eval_result: Mapping[str, Any]) -> bool:
    """Return whether the loss of a result is lower than that of the best one.

    Args:
        best_eval_result: metrics so far.
        current_eval_result: metrics of now.
    """
    return bool(current_eval_result["loss"] < best_eval_result["loss"])


class BestExporter(LatestExporter):
    """Exports after an evaluation that was better than all before, those before the job resumed included.

    Args:
        name: as for ``Exporter``.
        serving_input_receiver_fn: as for ``Exporter``.
        event_file_pattern: accepted; the best result is kept beside the exports.
        compare_fn: whether the second of two results is better than the first; by default by ``loss``.
        **named: of ``LatestExporter``.
    """

    def __init__(
        self,
        name: str = "best_exporter",
        serving_input_receiver_fn: Callable[[], Any] | None = None,
        event_file_pattern: str | None = None,
        compare_fn: Callable[[Any, Any], bool] = lower_loss,
        **named: Any,
    ) -> None:
        super().__init__(name, serving_input_receiver_fn, **named)
        self._is_better = compare_fn

    def _is_due(self, folder: Path, result: Mapping[str, Any], is_final: bool) -> bool:
        noted = folder / _BEST
        return not noted.exists() or self._is_better(json.loads(noted.read_text()), result)

    def _has_exported(self, folder: Path, result: Mapping[str, Any]) -> None:
        super()._has_exported(folder, result)
        numbers = {key: float(value) for key, value in result.items() if getattr(value, "ndim", 0) == 0}
        (folder / _BEST).write_text(json.dumps(numbers))


def checked(exporters: Any) -> list[Any]:
    """Return the exporters of an EvalSpec as a list.

    Args:
        exporters: None, one, or several.

    Raises:
        TypeError: what was given does not export.
        ValueError: two of them have one name.
    """
    if exporters is None:
        return []
    found = list(exporters) if isinstance(exporters, (list, tuple, set)) else [exporters]
    for each in found:
        if not callable(getattr(each, "export", None)) or not getattr(each, "name", None):
            raise TypeError(f"exporters have a name and a method export. Received: {each!r}")
    names = [each.name for each in found]
    if len({*names}) < len(names):
        raise ValueError(f"exporters need names of their own. Received: {names}")
    return found
