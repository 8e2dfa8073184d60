"""Names that every framework's module has: rank and size, process sets, reductions, build information.

A framework's module re-exports them with ``import *`` and ``__all__ += common_names.__all__``. mypy, pyright and
editors understand this form; they do not understand a computed list.
"""

from horovod.bindings.elastic.leave import on_leave
from horovod.bindings.job import JobFunctions
from horovod.bindings.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from horovod.bindings.reductions import Adasum, Average, Max, Min, Product, Sum
from horovod.errors import HorovodInternalError

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "on_leave",
    "rank",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stats",
    "stop_timeline",
]

_comm = JobFunctions()

init = _comm.init
shutdown = _comm.shutdown
is_initialized = _comm.is_initialized
size = _comm.size
rank = _comm.rank
local_size = _comm.local_size
local_rank = _comm.local_rank
cross_size = _comm.cross_size
cross_rank = _comm.cross_rank
is_homogeneous = _comm.is_homogeneous
start_timeline = _comm.start_timeline
stop_timeline = _comm.stop_timeline
stats = _comm.stats
mpi_threads_supported = _comm.mpi_threads_supported
mpi_built = _comm.mpi_built
mpi_enabled = _comm.mpi_enabled
gloo_built = _comm.gloo_built
gloo_enabled = _comm.gloo_enabled
nccl_built = _comm.nccl_built
ddl_built = _comm.ddl_built
ccl_built = _comm.ccl_built
cuda_built = _comm.cuda_built
rocm_built = _comm.rocm_built
