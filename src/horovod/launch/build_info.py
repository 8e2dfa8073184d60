"""The matrix that ``horovodrun --check-build`` prints. Imports no framework."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec

from horovod._version import HOROVOD_VERSION, __version__

__all__ = ["check_build"]

# Title, the framework's module, and our module for it.
_FRAMEWORKS = (
    ("TensorFlow", "tensorflow", "horovod.tensorflow"),
    ("PyTorch", "torch", "horovod.torch"),
    ("Keras", "keras", "horovod.keras"),
    ("JAX", "jax", "horovod.jax"),
    ("NumPy", "numpy", "horovod.numpy"),
)
# Distributions that bring a module of another name.
_DISTRIBUTIONS = {"tensorflow": ("tensorflow", "tensorflow-cpu", "tf-nightly")}
# Title, our module, and the module that it needs.
_CONTROLLERS = (("shared memory", "horovod.transports.shm", ""), ("MPI", "", "mpi4py"), ("Gloo", "", "torch"))
_OPERATIONS = (
    ("shared memory", "horovod.transports.shm", ""),
    ("NCCL", "horovod.transports.nccl", "nvidia.nccl"),
    ("MPI", "horovod.transports.mpi", "mpi4py"),
    ("Gloo", "horovod.transports.torch_dist", "torch"),
)


def check_build() -> str:
    """Return the features of this installation, in Horovod's layout."""
    return "\n".join(
        [
            f"Horovod v{HOROVOD_VERSION} (khorovod {__version__}):",
            "",
            "Available Frameworks:",
            *(_framework(*row) for row in _FRAMEWORKS),
            "",
            "Available Controllers:",
            *(_part(*row) for row in _CONTROLLERS),
            "",
            "Available Tensor Operations:",
            *(_part(*row) for row in _OPERATIONS),
            "",
            "Tensors move:",
            "    inside a host over shared memory",
            f"    between hosts over {_between_hosts()}",
            f"    of a GPU {_of_a_gpu()}",
        ]
    )


def _framework(title: str, name: str, part: str) -> str:
    there = _exists(name) and _exists(part)
    return _line(f"{title} {_version(name)}".rstrip() if there else title, there)


def _version(module: str) -> str:
    for distribution in _DISTRIBUTIONS.get(module, (module,)):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return ""


def _part(title: str, part: str, needs: str) -> str:
    return _line(title, (not part or _exists(part)) and (not needs or _exists(needs)))


def _between_hosts() -> str:
    """Say which engine moves tensors between hosts, unless HOROVOD_CPU_OPERATIONS names one."""
    mpi, gloo = _exists("mpi4py"), _exists("torch")
    if mpi and gloo:
        return "MPI where mpirun starts the ranks, else Gloo; HOROVOD_CPU_OPERATIONS chooses"
    if mpi:
        return "MPI: start the ranks with mpirun, or install torch for Gloo"
    if gloo:
        return "Gloo; for MPI, pip install 'khorovod[mpi]'"
    return "nothing: pip install torch for Gloo, or 'khorovod[mpi]' for MPI"


def _of_a_gpu() -> str:
    """Say how tensors of a GPU move."""
    if _exists("nvidia.nccl"):
        return "through host memory; over NCCL, where they are, with HOROVOD_GPU_OPERATIONS=NCCL"
    return "through host memory"


def _line(title: str, there: bool) -> str:
    return f"    [{'X' if there else ' '}] {title}"


def _exists(module: str) -> bool:
    try:
        return bool(module) and find_spec(module) is not None
    except (ImportError, ValueError):
        return False
