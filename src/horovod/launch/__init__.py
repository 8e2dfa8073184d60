"""Starts processes and watches them; loads no framework and no engine.

cli, run                        the two ways in: horovodrun, and horovod.run(fn)
flags, foreign, hosts, machine  what the user says, and what this machine is
plan                            what will be started: pure
supervise, local, output        starts it, passes its output on, ends it
keeper, task                    the programs that run below us: the ranks' parent, and a rank of horovod.run
outcome, report, build_info     how it went, and what to tell the user
"""
