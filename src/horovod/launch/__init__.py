"""Starts processes and watches them; loads no framework and no engine.

cli, run                        the two ways in: horovodrun, and horovod.run(fn)
flags, hosts, machine           what the user says, and what this machine is
assemble, host_checks, ssh      other hosts, checked side by side before anything starts
mpi, mpi_run                    what mpirun is told, where it starts the ranks
plan                            what will be started: pure
supervise, output               starts it, passes its output on, ends it
job, local, remote              the ranks of one host: of this one, and of another, through ssh and its agent
agent, frames                   what runs on another host, and how it is talked with
keeper, task                    the programs that run below us: the ranks' parent, and a rank of horovod.run
outcome, report, build_info     how it went, and what to tell the user
"""
