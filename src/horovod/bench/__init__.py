"""``python -m horovod.bench``: how fast this machine is with horovod, and with its alternatives.

    cli            what the user typed; starts its own ranks when no launcher did
    cases          what is measured: sizes, element counts, expected values, bandwidth formulas (pure)
    stats          medians and ratios (pure)
    ours, gloo     contenders that live in the rank processes
    mpi            contender that runs mpi4py in processes of its own, between our rounds
    collective     the interleaved rounds; async is one of its cases
    train, models  an optimizer step beyond no communication
    observed       what a timeline and the flight recorder add to such a step
    startup, idle, memory
    report, plot, host     table, JSON, SVG

Peers are measured in the same run, in alternating rounds, because a figure from another minute on
another load says nothing.
"""

from __future__ import annotations
