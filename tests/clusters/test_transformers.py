"""The samples of docs/transformers.md: two ranks train to the weights of one process with a batch of twice the size."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import horovodrun

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
DATA = """
torch.manual_seed(hvd.rank())  # rank 0's weights count
model, x = Net(), torch.linspace(-1, 1, 96).reshape(32, 3)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True) ** 2)
{train}
print("weights", json.dumps([p.tolist() for p in model.parameters()]), flush=True)
"""
MODEL = """
import json, sys
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def forward(self, x, labels=None):
        out = self.layers(x)
        return out if labels is None else {"loss": torch.nn.functional.mse_loss(out, labels), "logits": out}
"""
ARGUMENTS = """
import transformers
args = transformers.TrainingArguments(
    sys.argv[1], per_device_train_batch_size=int(sys.argv[2]), num_train_epochs=2, optim="sgd", learning_rate=0.1,
    train_sampling_strategy="sequential", save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
    gradient_accumulation_steps=2, max_grad_norm=0.5,
)
"""
TRAIN = {
    "transformers": ARGUMENTS
    + """
rows = [{"x": one, "labels": y} for one, y in data]
HorovodTrainer(model, args, train_dataset=rows).train()
""",
    # As it is for torchrun.
    "socket": ARGUMENTS
    + """
assert args.world_size == hvd.size()
transformers.Trainer(model, args, train_dataset=[{"x": one, "labels": y} for one, y in data]).train()
""",
    "accelerate": """
train(model, torch.optim.SGD(model.parameters(), lr=0.1), data, int(sys.argv[2]))
""",
}


def weights(output: str) -> list[object]:
    """The weights of each rank, in any order."""
    return [json.loads(found) for found in re.findall(r"weights (\[.*\])$", output, re.MULTILINE)]


@pytest.mark.parametrize("name", ["transformers", "accelerate", "socket"])
def test_two_ranks_train_as_one_process_does(name: str, tmp_path: Path) -> None:
    sample = next(s for s in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if f"import {name}" in s)
    script = tmp_path / "train.py"
    begin = "" if "\nhvd.init()" in sample else "hvd.init()\n"
    script.write_text(sample + begin + "import torch\n" + MODEL + DATA.format(train=TRAIN[name]))
    ended = horovodrun("-np", "2", sys.executable, str(script), str(tmp_path / "out"), "4")
    assert ended.code == 0, ended.err
    first, second = weights(ended.out)
    assert first == second
    alone = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "out"), "8"], capture_output=True, text=True, timeout=200
    )
    assert alone.returncode == 0, alone.stderr
    (expected,) = weights(alone.stdout)
    flat = [json.dumps(value) for value in (first, expected)]
    numbers = [[float(number) for number in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", text)] for text in flat]
    assert numbers[0] == pytest.approx(numbers[1], abs=1e-6)
