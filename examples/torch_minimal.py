"""The smallest change: five lines make a single-process PyTorch script use every rank.

python examples/torch_minimal.py                       # one process
horovodrun -np 2 python examples/torch_minimal.py      # two: the same training, shared out
"""

import torch
from sklearn.datasets import load_digits

import horovod.torch as hvd  # 1

hvd.init()  # 2
torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.data / 16, dtype=torch.float32)
labels = torch.tensor(digits.target)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())  # 3
hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # 4

for _ in range(10):
    for batch in torch.randperm(len(images)).split(60):
        batch = batch[hvd.rank() :: hvd.size()]  # 5
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()

accuracy = (model(images).argmax(dim=1) == labels).float().mean()
print(f"training accuracy {accuracy:.1%}")
