"""Gradients of all ranks made the same while backward still runs; for every framework, over a ``GradientAdapter``.

adapter       what a framework offers: gradients, flat buffers, hooks
settings      settings of the reduction
slots         one parameter and where its gradient goes
layout        which gradients travel together; pure planning
collective    how a bucket travels: allreduced, or reduce-scattered into the shards of an optimizer
buckets       gradients as views of one buffer
survey        exchange between ranks before buckets are planned
reducer       hooks, accumulation over several backward passes, and the order of operations
parameters    names and groups, as a user gives them
"""
