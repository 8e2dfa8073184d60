"""``python -m horovod.bench``: measure horovod beside its alternatives, in the same run.

    cli                  command line; starts the ranks when no launcher did
    rank                 one rank's part of a benchmark
    cases, stats         the measured cases, and medians and ratios (pure)
    collective           alternating rounds of all contenders
    on_torch             horovod, Gloo and DDP, called in the rank processes
    stepping, models     training steps
    profile, network     the parts of a call; the links between hosts
    report               the result as a table and as JSON

Contenders take turns, because figures from different minutes and loads cannot be compared.
Frameworks other than torch, and MPI, are measured from a checkout: see ``benchmarks/README.md``.
"""

from __future__ import annotations
