"""Train a small network on scikit-learn's handwritten digits with PopDist and PopTorch.

poprun --num-replicas=4 --num-instances=2 python -m khorovod_ipu.examples.popdist_digits
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits

import popdist
import popdist.poptorch
import poptorch

EPOCHS, BATCH = 10, 8


class Classifier(torch.nn.Module):
    """A small network that computes its own loss, as PopTorch requires."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        self.loss = torch.nn.CrossEntropyLoss()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        scores = self.layers(x)
        if labels is None:
            return scores
        return scores, poptorch.identity_loss(self.loss(scores, labels), reduction="mean")


def save(model: poptorch.PoplarExecutor) -> None:
    torch.save(model.state_dict(), "digits.pt")
    print(f"instance {popdist.getInstanceIndex()} saves the model", flush=True)


def main() -> None:
    popdist.init()
    digits = load_digits()
    data = torch.utils.data.TensorDataset(
        torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    )
    training, test = torch.utils.data.random_split(data, [1437, 360], torch.Generator().manual_seed(0))

    options = popdist.poptorch.Options().deviceIterations(2).randomSeed(42)
    options.Training.gradientAccumulation(2)
    loader = poptorch.DataLoader(options, training, batch_size=BATCH, shuffle=True)
    torch.manual_seed(0)
    model = Classifier()
    trained = poptorch.trainingModel(model, options, poptorch.optim.Adam(model.parameters(), lr=0.005))

    for epoch in range(EPOCHS):
        losses = [trained(x, labels)[1].mean() for x, labels in loader]
        loss = popdist.allReduceSum(np.array([float(torch.stack(losses).mean())]))[0] / popdist.getNumInstances()
        if popdist.getInstanceIndex() == 0:
            print(f"epoch {epoch}: loss {loss:.3f}", flush=True)
    trained.copyWeightsToHost()
    popdist.execute_on_instances({0}, save, trained)

    images, labels = data[test.indices]
    scores = poptorch.inferenceModel(model)(images)
    right = (scores.argmax(1) == labels).float().mean()
    print(f"instance {popdist.getInstanceIndex()} of {popdist.getNumInstances()}: accuracy {right:.0%}", flush=True)


if __name__ == "__main__":
    main()
