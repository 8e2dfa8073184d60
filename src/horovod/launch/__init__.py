"""Starts processes and watches them; loads no framework and no engine.

cli, command, run               the two ways in: horovodrun, and horovod.run(fn)
flags, hosts                    the user's options, and the hosts
assemble, host_checks, ssh      other hosts, checked side by side before anything starts
mpi                             the command line of mpirun, for jobs whose ranks mpirun starts
plan                            the ranks to start: pure
supervise, output               starts the ranks, passes their output on, ends them
job, local, remote              the ranks of one host: of this host, or of another one through ssh and its agent
agent, frames                   the launcher's agent on another host, and its protocol
keeper, task                    the programs that run below us: the ranks' parent, and a rank of horovod.run
report, build_info              the result of a job, and texts for the user
"""
