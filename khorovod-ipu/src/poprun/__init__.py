"""PopRun in software: starts the instances of a program, and tells each which replicas of the job are its own.

cli             the command
flags           its options, and files of settings
topology        who is where
mpi_arguments   what arguments of mpirun mean here
networks        which interfaces lead into a subnet
bind            instances bound to NUMA nodes
log, version    what it says about itself
"""

from __future__ import annotations

from khorovod_ipu.guard import refuse_beside_the_sdk

refuse_beside_the_sdk()
