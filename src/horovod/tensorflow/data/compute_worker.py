"""The program of a compute job: ``horovodrun -np N python -m horovod.tensorflow.data.compute_worker CONFIGFILE``."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Sequence

from horovod.rendezvous.service import Service
from horovod.tensorflow.data.compute_service import TfDataServiceConfig, compute_worker_fn, host_here
from horovod.tensorflow.functions import broadcast_object
from horovod.tensorflow.mpi_ops import barrier, init, rank, shutdown, size

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a data service until a client ends it.

    Args:
        arguments: command line arguments; those of ``sys.argv`` when None.

    Raises:
        ValueError: the processes do not divide evenly among the dispatchers.
    """
    parser = argparse.ArgumentParser(prog="python -m horovod.tensorflow.data.compute_worker", description=__doc__)
    parser.add_argument("configfile", metavar="CONFIGFILE", help="written for the training job, which reads it")
    parser.add_argument("--dispatchers", type=int, default=1, help="number of dispatchers (default: 1)")
    parser.add_argument(
        "--dispatcher-side", choices=["compute", "training"], default="compute",
        help="which job runs the dispatchers (default: compute)",
    )  # fmt: skip
    parser.add_argument("--timeout", type=float, default=60, help="seconds to wait for the others (default: 60)")
    args = parser.parse_args(arguments)
    init()
    if args.dispatchers < 1 or size() % args.dispatchers:
        raise ValueError(
            f"the number of processes ({size()}) must be a multiple of the number of dispatchers ({args.dispatchers})"
        )
    workers, key = size() // args.dispatchers, secrets.token_bytes(32)
    service = config = None
    if rank() == 0:
        host = host_here()
        service = Service(key, ["127.0.0.1" if host == "localhost" else "0.0.0.0"])
        address = ("127.0.0.1" if host == "localhost" else host, int(service.endpoints[0].rpartition(":")[2]))
        config = TfDataServiceConfig(args.dispatchers, workers, args.dispatcher_side, (address,), key, args.timeout)
        config.write(args.configfile)
    try:
        compute_worker_fn(broadcast_object(config, name="compute_worker"))
        # Keep the registry until all workers have seen the shutdown.
        barrier()
    finally:
        if service is not None:
            service.close()
        shutdown()


if __name__ == "__main__":
    main()
