"""Gradients of all ranks made the same while backward still runs.

tensors       parameters, gradients and flat buffers of torch
settings      how gradients are reduced
slots         one parameter and where its gradient goes
collective    how a bucket travels: allreduced, or reduce-scattered into the shards of an optimizer
buckets       gradients as views of one buffer
unbucketed    gradients that travel in no bucket
survey        what the ranks tell each other before buckets are planned
reducer       hooks, accumulation over several backward passes, and the order of all of it
names         of the operations, and their form in messages
parameters    names and groups, as a user gives them
"""
