"""Train while ranks are lost and join; --kill ends one rank in the middle of a step.

horovodrun -np 3 --min-np 2 python examples/torch_elastic.py --kill
"""

import argparse
import os
import signal

import torch

import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--kill", action="store_true")
arguments = parser.parse_args()

hvd.init()
torch.manual_seed(1)
x = torch.randn(600, 8)
y = x.sum(1, keepdim=True)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
batches = hvd.elastic.shard((x, y), batch_size=10, shuffle=True)


def kill_at_step_10(grad):
    if arguments.kill and state.progress == 10 and hvd.size() == 3 and hvd.rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)


model[0].weight.register_hook(kill_at_step_10)


@hvd.elastic.step
def one_step(state, x, y):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    state.loss, state.samples = float(loss.detach()), state.samples + 1


@hvd.elastic.run
def train(state):
    print(f"rank {hvd.rank()} of {hvd.size()} goes on with step {state.progress}")
    while state.epoch < 2:
        for batch in state.batches:
            one_step(state, *batch)
        state.epoch += 1
        state.batches.set_epoch(state.epoch)


state = hvd.elastic.TorchState(model, optimizer, batches=batches, epoch=0, loss=0.0, samples=0)
train(state)
print(f"rank {hvd.rank()}: {state.progress} steps, {state.epoch} epochs")
