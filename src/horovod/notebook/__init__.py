"""Ranks that live between the cells of a notebook: ``horovod.interactive`` and the cell magic ``%%hvd``.

magic     starts a session, and defines the magic
session   the kernel's side: sends cells, gathers replies
ranks     supervises the processes in a thread, gathers their output
cells     the program of a rank
messages  messages between kernel and ranks
"""
