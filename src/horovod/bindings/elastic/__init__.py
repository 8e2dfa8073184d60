"""Training that goes on when ranks are lost or join; the part that all frameworks share.

sampler        which samples are left in an epoch, and which rank takes which of them; pure
shard          the batches of one rank, of arrays and iterables
state          what is saved, restored and brought to all ranks
generators     Python's and numpy's random generators
run            the loop around a training function
step           a function that is one step: done on all ranks, or without effect
rates          a learning rate, or accumulated batches, that follow the number of ranks
leave          a process that was asked to end
checkpoint     the state in a file, without pickles
notifications  Horovod's notices of changed hosts
"""
