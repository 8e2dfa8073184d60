"""Store of an estimator's data, checkpoints and logs: a folder in any file system that fsspec supports."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
from fsspec.core import split_protocol

from horovod.errors import RequestError

__all__ = ["DBFSLocalStore", "FilesystemStore", "HDFSStore", "LocalStore", "Store"]

_DBFS = ("dbfs:/", "/dbfs/", "file:///dbfs/")


def _is_hidden(name: str) -> bool:
    """Return whether Spark ignores a file or folder: an unfinished write, or the log of a table."""
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


class Store:
    """A folder for estimators; driver, executors and ranks must reach it under the same name.

    Objects of this class are sent to executors and ranks, with ``storage_options``.

    Args:
        prefix_path: folder or URL, such as ``/shared/folder``, ``s3://bucket/folder``, ``hdfs://host:port/folder``.
        train_path: folder of the training data; this and the following default to folders below ``prefix_path``.
        val_path: folder of the validation data.
        test_path: folder of the test data.
        runs_path: folder of checkpoints and logs.
        save_runs: whether to write checkpoints.
        storage_options: arguments for the file system, such as credentials.

    Raises:
        RequestError: no installed package reads this kind of URL, or it has one slash after its scheme.
    """

    def __init__(
        self,
        prefix_path: str | os.PathLike[str],
        train_path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        runs_path: str | None = None,
        save_runs: bool = True,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        prefix = os.fspath(prefix_path).rstrip("/")
        if re.match(r"[A-Za-z][\w+.-]+:/(?!/)", prefix):  # as Spark writes some; it would be a folder "file:" here
            raise RequestError(f"write the store's URL with its host or three slashes, as file:///folder: {prefix!r}")
        self.prefix_path = prefix if split_protocol(prefix)[0] else str(Path(prefix).absolute())
        self.storage_options = dict(storage_options or {})
        self._paths = {
            "train": train_path or self._below("intermediate_train_data"),
            "val": val_path or self._below("intermediate_val_data"),
            "test": test_path or self._below("intermediate_test_data"),
        }
        self._runs_path = runs_path or self._below("runs")
        self._save_runs = save_runs
        _ = self.fs

    @staticmethod
    def create(prefix_path: str, *args: Any, **kwargs: Any) -> Store:
        """Return the store for a folder or URL.

        Args:
            prefix_path: ``dbfs:/...`` and ``/dbfs/...`` are Databricks' folders; fsspec opens others.
            args: positional arguments of the store's class.
            kwargs: keyword arguments of the store's class.

        Raises:
            RequestError: no installed package reads this kind of URL.
        """
        if str(prefix_path).startswith(_DBFS):
            return DBFSLocalStore(prefix_path, *args, **kwargs)
        is_hdfs = split_protocol(str(prefix_path))[0] in ("hdfs", "viewfs")
        return (HDFSStore if is_hdfs else FilesystemStore)(prefix_path, *args, **kwargs)

    @property
    def fs(self) -> Any:
        """The fsspec file system."""
        try:
            return fsspec.core.url_to_fs(self.prefix_path, **self.storage_options)[0]
        except (ImportError, ValueError, OSError) as error:
            raise RequestError(
                f"no file system for the store {self.prefix_path!r}: {error}\n"
                "Install what fsspec needs for it (s3fs, gcsfs, adlfs, Hadoop's libhdfs), or use a shared folder."
            ) from error

    def without_options(self) -> Store:
        """Return a copy without ``storage_options``, which may hold credentials, for saving to files."""
        copy: Store = object.__new__(type(self))
        copy.__dict__.update(self.__dict__, storage_options={})
        return copy

    def _below(self, *names: str) -> str:
        return posixpath.join(self.prefix_path, *names)

    def is_parquet_dataset(self, path: str) -> bool:
        """Return whether a folder holds Parquet files."""
        return bool(self.parquet_files(path))

    def parquet_files(self, path: str) -> list[str]:
        """Return the Parquet files below a folder that Spark would read, by name.

        Args:
            path: path of the folder.
        """
        if not self.exists(path):
            return []
        start = len(self.fs._strip_protocol(path))
        names = [name for name in self.fs.find(path) if not any(map(_is_hidden, name[start:].split("/")))]
        return sorted(name for name in names if name.endswith((".parquet", ".pq")))

    def get_train_data_path(self, idx: Any = None) -> str:
        """Return the folder of the training data, or of the ``idx``-th training data."""
        return self._data_path("train", idx)

    def get_val_data_path(self, idx: Any = None) -> str:
        """Return the folder of the validation data, or of the ``idx``-th."""
        return self._data_path("val", idx)

    def get_test_data_path(self, idx: Any = None) -> str:
        """Return the folder of the test data, or of the ``idx``-th."""
        return self._data_path("test", idx)

    def _data_path(self, kind: str, idx: Any) -> str:
        return self._paths[kind] if idx is None else f"{self._paths[kind]}.{idx}"

    def saving_runs(self) -> bool:
        """Return whether checkpoints are written."""
        return self._save_runs

    def get_runs_path(self) -> str:
        """Return the folder of all runs."""
        return self._runs_path

    def get_run_path(self, run_id: str) -> str:
        """Return the folder of a run."""
        return posixpath.join(self._runs_path, run_id)

    def get_checkpoint_path(self, run_id: str) -> str:
        """Return the folder of a run's checkpoints."""
        return posixpath.join(self.get_run_path(run_id), self.get_checkpoint_filename())

    def get_checkpoints(self, run_id: str, suffix: str = ".zip") -> list[str]:
        """Return a run's checkpoints, the latest last.

        Args:
            run_id: id of the run.
            suffix: suffix of the checkpoints' names.
        """
        path = self.get_checkpoint_path(run_id)
        found = self.fs.find(path) if self.exists(path) else []
        named = [name for name in found if name.endswith(suffix) and not posixpath.basename(name).startswith(".")]
        return sorted(named, key=lambda name: (len(name), name))

    def get_checkpoint_filename(self) -> str:
        """Return the name of the folder of checkpoints within a run."""
        return "checkpoint"

    def get_logs_path(self, run_id: str) -> str:
        """Return the folder of a run's logs."""
        return posixpath.join(self.get_run_path(run_id), self.get_logs_subdir())

    def get_logs_subdir(self) -> str:
        """Return the name of the folder of logs within a run."""
        return "logs"

    def exists(self, path: str) -> bool:
        """Return whether a file or folder exists."""
        fs = self.fs
        fs.invalidate_cache()  # fsspec keeps listings, but executors, ranks and Spark itself write to the store, too
        return bool(fs.exists(path))

    def read(self, path: str) -> bytes:
        """Return the content of a file."""
        return bytes(self.fs.cat_file(path))

    def write_text(self, path: str, text: str) -> None:
        """Write a UTF-8 file; create its folders."""
        self.make_folder(posixpath.dirname(path))
        self.fs.pipe_file(path, text.encode())

    def make_folder(self, path: str) -> None:
        """Create a folder, if it does not exist."""
        self.fs.makedirs(path, exist_ok=True)

    def put(self, local: Path, path: str) -> None:
        """Copy a local file to a new name atomically: readers never see a partial file.

        Args:
            local: the file.
            path: a name that does not exist.
        """
        folder, name = posixpath.split(path)
        self.make_folder(folder)
        hidden = posixpath.join(folder, f".{name}.part")
        self.fs.put_file(str(local), hidden)
        self.fs.mv(hidden, path)

    def delete(self, path: str) -> None:
        """Remove a file, or a folder with its files; do nothing if it does not exist."""
        if self.exists(path):
            self.fs.rm(path, recursive=True)

    def sync_fn(self, run_id: str) -> Callable[[str], None]:
        """Return a function that copies the files of a local folder into the folder of a run.

        Args:
            run_id: id of the run.
        """

        def sync(local_run_path: str) -> None:
            for file in sorted(Path(local_run_path).rglob("*")):
                if file.is_file():
                    target = posixpath.join(self.get_run_path(run_id), *file.relative_to(local_run_path).parts)
                    self.make_folder(posixpath.dirname(target))
                    self.fs.put_file(str(file), target)

        return sync

    def to_remote(self, run_id: str, dataset_idx: Any = None) -> SimpleNamespace:
        """Return the paths of a run as attributes, for functions that run on the ranks.

        Args:
            run_id: id of the run.
            dataset_idx: index of the data.
        """
        return SimpleNamespace(
            train_data_path=self.get_train_data_path(dataset_idx),
            val_data_path=self.get_val_data_path(dataset_idx),
            test_data_path=self.get_test_data_path(dataset_idx),
            saving_runs=self.saving_runs(),
            runs_path=self.get_runs_path(),
            run_path=self.get_run_path(run_id),
            checkpoint_path=self.get_checkpoint_path(run_id),
            checkpoint_filename=self.get_checkpoint_filename(),
            logs_path=self.get_logs_path(run_id),
            logs_subdir=self.get_logs_subdir(),
            sync=self.sync_fn(run_id),
        )


class FilesystemStore(Store):
    """A store in any file system that fsspec supports."""


LocalStore = FilesystemStore


class HDFSStore(Store):
    """A store in HDFS, through pyarrow and Hadoop's libhdfs.

    Args:
        prefix_path: ``hdfs://host:port/folder``, or a folder of the default file system.
        host: host of the name node, if the URL names none.
        port: port of the name node.
        user: user name for reading and writing.
        kerb_ticket: file of the Kerberos ticket.
        extra_conf: Hadoop settings.
        options: arguments of ``Store``.
    """

    def __init__(
        self,
        prefix_path: str,
        host: str | None = None,
        port: int | None = None,
        user: str | None = None,
        kerb_ticket: str | None = None,
        extra_conf: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        url = prefix_path if split_protocol(prefix_path)[0] else f"hdfs://{prefix_path}"
        given = {"host": host, "port": port, "user": user, "kerb_ticket": kerb_ticket, "extra_conf": extra_conf}
        known = {name: value for name, value in given.items() if value is not None}
        super().__init__(url, storage_options=known | (options.pop("storage_options", None) or {}), **options)


class DBFSLocalStore(FilesystemStore):
    """A store in Databricks' file system, through its mount ``/dbfs``."""

    def __init__(self, prefix_path: str, *args: Any, **kwargs: Any) -> None:
        start = next((start for start in _DBFS if prefix_path.startswith(start)), "")
        super().__init__("/dbfs/" + prefix_path[len(start) :].lstrip("/"), *args, **kwargs)
