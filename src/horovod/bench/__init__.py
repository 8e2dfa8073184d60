"""``python -m horovod.bench``: measure horovod beside its alternatives, in the same run.

Contenders take turns, because figures from different minutes and loads cannot be compared.
Frameworks other than torch, and MPI, are measured from a checkout: see ``benchmarks/README.md``.
"""
