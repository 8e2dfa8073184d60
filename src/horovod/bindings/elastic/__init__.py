"""Training that goes on when ranks are lost or join; the part that all frameworks share.

sampler        the samples that are left in an epoch, and their assignment to ranks; pure
shard          the batches of one rank, of arrays and iterables
state          values that are saved, restored and sent to all ranks
generators     Python's and numpy's random generators
run            the loop around a training function
step           a function that is one step: completed on all ranks, or without effect
rates          a learning rate, or a number of accumulated batches, that follows the number of ranks
leave          orderly exit of a process after SIGTERM
checkpoint     the state in a file, without pickles
notifications  Horovod's notices of changed hosts
"""
