"""Starts processes and watches them; loads no framework and no engine.

cli, run                        the two ways in: horovodrun, and horovod.run(fn)
flags, hosts, machine           what the user says, and what this machine is
plan                            what will be started: pure
supervise, local, output        starts it, passes its output on, ends it
keeper, task                    the programs that run below us: the ranks' parent, and a rank of horovod.run
report, build_info              what to tell the user
"""
