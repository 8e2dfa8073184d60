"""A script that ends with an exception: its own output, and the error of the other ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from commands import printed, run
from launching import PATIENT

from horovod.observe import stacks

LONELY = """
import horovod.numpy as hvd
hvd.init()
"""


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("HOROVOD_LOG_LEVEL", "loud", "HOROVOD_LOG_LEVEL must be one of"),
        ("HOROVOD_TIMELINE", "/proc/trace.json", "HOROVOD_TIMELINE=/proc/trace.json cannot be written: Operation"),
        ("HOROVOD_RANK", "5", "HOROVOD_RANK='5' is set but HOROVOD_SIZE is not"),
    ],
)
def test_an_error_of_init_is_told_in_one_line_of_the_script(
    tmp_path: Path, variable: str, value: str, said: str
) -> None:
    (tmp_path / "s.py").write_text(LONELY)
    code, output = run(["python", "s.py"], tmp_path, **{variable: value})
    first, *place, last = printed(output)
    assert (code, first) == (1, "Traceback (most recent call last):")
    assert place == [f'  File "{tmp_path / "s.py"}", line 3, in <module>', "    hvd.init()"]
    assert last.startswith(f"horovod.errors.InitError: {said}")


ENDS = """
import numpy as np
import horovod.numpy as hvd
hvd.init()
if hvd.rank() == 1:
    HOW
hvd.allreduce(np.ones(3), name="after")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("hvd.broadcast(np.ones(3), root_rank=7)", "ended with RequestError: broadcast received invalid root rank 7"),
        ("raise KeyboardInterrupt", "ended with KeyboardInterrupt"),
        ("raise SystemExit(3)", "has left the job: it ended its script"),
    ],
)
def test_others_are_told_the_line_of_the_script(tmp_path: Path, how: str, said: str) -> None:
    (tmp_path / "s.py").write_text(ENDS.replace("HOW", how))
    _, output = run([*PATIENT, "-np", "2", "python", "s.py"], tmp_path)
    [error] = [line for line in output.splitlines() if line.startswith("[0]<stderr>:horovod.errors.PeerLostError")]
    place = "" if "SystemExit" in how else f" at {tmp_path / 's.py'}:6"
    assert f" on {os.uname().nodename}) {said}" in error
    assert place in error and "KeyboardInterrupt:" not in error


MISUSE = """
import torch
import horovod.torch as hvd
hvd.init()
net = torch.nn.Linear(3, 2)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
for _ in range(1 + hvd.rank()):
    net(torch.ones(4, 3)).sum().backward()
optimizer.step()
"""


@pytest.mark.slow
def test_a_wrong_use_of_the_optimizer_ends_with_the_line_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(MISUSE)
    _, output = run([*PATIENT, "-np", "2", "python", "s.py"], tmp_path)
    _, *place, last = printed(output, "[1]<stderr>:")
    assert place == [f'  File "{tmp_path / "s.py"}", line 8, in <module>', "    net(torch.ones(4, 3)).sum().backward()"]
    wrong = "OptimizerUseError: the gradient of allreduce.noname.0.1 came 2 times since the last step"
    assert last.startswith(f"horovod.errors.{wrong}")
    # The others are told the line once.
    [told] = [line for line in output.splitlines() if line.startswith("[0]<stderr>:horovod.errors.PeerLostError")]
    assert f"ended with {wrong}" in told
    assert told.partition(", while rank 0 waited in ")[0].count(str(tmp_path / "s.py")) == 1


def _calls(name: str, function: Callable[[], Any]) -> Callable[[], Any]:
    """A function of a module of this name that calls ``function``."""
    scope: dict[str, Any] = {"__name__": name, "function": function}
    exec(compile("def call():\n    return function()", "<called>", "exec"), scope)
    return scope["call"]


def _stack_of(*modules: str) -> list[str]:
    """The frames that are shown of code that went through these modules, outermost first."""

    def here() -> FrameType | None:
        return sys._getframe().f_back

    call: Callable[[], Any] = here
    for name in reversed(modules):
        call = _calls(name, call)
    return [line for line in stacks.render(call()) if line.startswith('File "<called>"')]


def test_a_long_stack_keeps_the_line_of_the_user_at_its_outer_end() -> None:
    called = "def user():\n    return f()\ndef inner(n):\n    return inner(n - 1) if n else frame()"
    scope: dict[str, Any] = {"__name__": "user", "f": lambda: scope["inner"](60), "frame": sys._getframe}
    exec(compile(called, "user.py", "exec"), scope)
    lines = [line for line in stacks.render(scope["user"]()) if not line.startswith("  ")]
    assert len(lines) == 41
    assert any(line.startswith("... ") and line.endswith(" frames ...") for line in lines[1:])
    assert "user.py" in lines[-1]
    assert not any("outer frames" in line for line in lines)


def test_of_a_stack_the_lines_of_the_user_are_told() -> None:
    stack = [
        'File "/home/me/train.py", line 9, in <module>',
        "  loss.backward()",
        'File "/v/lib/python3.11/site-packages/torch/autograd/graph.py", line 979, in backward',
        "  return run_backward(",
        'File "/home/me/train.py", line 5, in hook',
        "  hvd.allreduce_(p.grad)",
    ]
    assert stacks.user_lines(stack, 6) == stack[:2] + stack[4:]
    assert stacks.user_lines(stack[2:4], 6) == stack[2:4]


def test_a_stack_ends_with_the_code_that_called_this_package() -> None:
    frame = 'File "<called>", line 2, in call'
    assert _stack_of("user", "horovod.torch", "torch.utils", "horovod.engine") == [frame]
    # A thread that waits in torch for something else shows it.
    assert _stack_of("user", "torch.utils") == [frame] * 2
    assert _stack_of("horovod.data", "user") == [frame] * 2
