"""JAX's own collectives between CPU processes, over Gloo: the peer of ``horovod.jax``, in the same rank processes."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from horovod.bench.control import Agreement

__all__ = ["AXIS", "own_part", "ranks_mesh", "spread", "start_jax", "sum_over_ranks"]

#: The axis of the mesh of all ranks.
AXIS = "ranks"


def start_jax(control: Agreement) -> None:
    """Connect JAX's processes, before anything else is done with JAX; on every rank."""
    address = ""
    if control.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"127.0.0.1:{server.getsockname()[1]}"
    jax.distributed.initialize(control.broadcast(address), control.size, control.rank, local_device_ids=[0])
    control.barrier()


def ranks_mesh() -> Mesh:
    """Return the mesh of one device of each rank."""
    return Mesh(np.array(jax.devices()), (AXIS,))


def spread(mesh: Mesh, rows: Any) -> jax.Array:
    """Return one array of all ranks' rows."""
    return jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec(AXIS)), np.asarray(rows))


def own_part(array: jax.Array) -> Any:
    """Return what this rank has of an array."""
    return array.addressable_data(0)


def sum_over_ranks(array: Any) -> Callable[[], Any]:
    """Return the call that adds the ranks' arrays up in a program."""
    mesh = ranks_mesh()
    rows = spread(mesh, array[None])
    mapped = jax.shard_map(
        lambda x: jax.lax.psum(x, AXIS), mesh=mesh, in_specs=PartitionSpec(AXIS), out_specs=PartitionSpec()
    )
    program = jax.jit(mapped)
    return lambda: own_part(program(rows).block_until_ready())
