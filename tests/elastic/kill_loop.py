"""Kill ranks at random moments, a thousand times, and look whether a bit, a sample or a process is wrong.

python tests/elastic/kill_loop.py --kills 1000 [--frameworks torch,jax] [--seed 1] [--seconds 600]

Jobs of 2 to 5 ranks train a model whose end is known to the bit (``killed_trainings``), with and without spares and
replacements, on one host or two. Meanwhile processes are killed or stopped: while they start, meet, copy, train, end;
two at once, and again while the others recover. At least one that has the state is left alone. Prints a line for each
job, then how many were killed in each framework; exit code 1 with the seed of what was wrong.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

import killed_trainings as trainings
from elastic_job import ElasticJob
from leaks import Belongings, leaked_since

from horovod.core.membership_events import Assign, Begin, Policy

_LIMIT_S = 150.0
_KILLS_PER_JOB, _JOB_S = 25, 60.0
_ENDED = "this process has no place in the job: the job has ended"


class _Chaos:
    """Kills processes of one job.

    Args:
        job: the job.
        rng: where chance comes from.
    """

    def __init__(self, job: ElasticJob, rng: random.Random) -> None:
        self._job, self._rng = job, rng
        self._looked = 0
        self._latest: Assign | None = None
        self._members: set[int] = set()
        self._with_state: set[int] = set()
        self._killed: set[int] = set()
        self._thaw: list[tuple[float, int]] = []
        self.kills = self.generation = 0

    def look(self) -> bool:
        """See what the service has decided; return whether the job is over."""
        with self._job._changed:
            decisions, self._looked = self._job.decisions[self._looked :], len(self._job.decisions)
            running = {slot: one.process.pid for slot, one in self._job._running.items()}
        for decision in decisions:
            if isinstance(decision, Assign):
                self._latest = decision
            elif isinstance(decision, Begin) and self._latest is not None:
                self.generation = decision.generation
                old = [s for s, p in self._latest.positions.items() if p.previous >= 0 or decision.generation == 1]
                self._with_state = {running[slot] for slot in old if slot in running}
                self._members = {running[slot] for slot in self._latest.positions if slot in running}
        for at_s, pid in list(self._thaw):
            if time.monotonic() >= at_s:
                self._thaw.remove((at_s, pid))
                self._signal(pid, signal.SIGCONT)
        return self._job.finish is not None

    def await_generation(self, number: int, limit_s: float) -> bool:
        """Wait until a generation has begun; return whether the job goes on."""
        deadline = time.monotonic() + limit_s
        while not self.look():
            if self.generation >= number:
                return True
            if time.monotonic() > deadline:
                raise TimeoutError(f"generation {number} did not begin within {limit_s:g} s")
            time.sleep(0.005)
        return False

    def pause(self, longest_s: float) -> bool:
        """Wait for a random time; return whether the job goes on."""
        end_s = time.monotonic() + longest_s * self._rng.random() ** 2
        while time.monotonic() < end_s:
            if self.look():
                return False
            time.sleep(0.002)
        return True

    def strike(self) -> bool:
        """Kill a process, or stop it for a while; return whether a member was killed, so that others follow."""
        self.look()
        with self._job._changed:
            alive = {one.process.pid for one in self._job._running.values()} - self._killed
        left = self._with_state & alive
        victims = sorted(alive - self._with_state) + (sorted(left) if len(left) > 1 else [])
        if not victims:
            return False
        pid = self._rng.choice(victims)
        how = self._rng.random()
        if how < 0.1:
            self._signal(pid, signal.SIGSTOP)
            self._thaw.append((time.monotonic() + self._rng.random(), pid))
            return False
        self._killed.add(pid)
        self._thaw = [(at_s, other) for at_s, other in self._thaw if other != pid]
        if how < 0.13 and pid in self._members:  # nobody tells it to go on: it is fenced
            self._signal(pid, signal.SIGSTOP)
        else:
            self._signal(pid, signal.SIGKILL)
        self.kills += 1
        return pid in self._members

    def _signal(self, pid: int, number: int) -> None:
        with self._job._changed:
            if any(one.process.pid == pid for one in self._job._running.values()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)


def _policy(rng: random.Random) -> tuple[Policy, dict[str, int]]:
    size, spares = rng.randint(2, 5), rng.choice((0, 0, 1))
    is_replaced = rng.random() < 0.75
    cool_down_s = (0.0, 0.0) if is_replaced else None
    policy = Policy(size, 1, cool_down_s=cool_down_s, spares=spares, timeout_s=60.0, start_timeout_s=_LIMIT_S)
    slots = size + spares
    return policy, {"a": slots} if rng.random() < 0.75 else {"a": slots - slots // 2, "b": slots // 2}


def _run(mode: str, seed: int, most: int) -> tuple[int, str]:
    """Run a job; return how many were killed, and what is wrong."""
    rng = random.Random(seed)
    policy, hosts = _policy(rng)
    with tempfile.TemporaryDirectory() as folder:
        job = ElasticJob(trainings.train, policy, hosts, (mode, folder), trainings.SERVERS[mode])
        chaos = _Chaos(job, rng)
        try:
            wrong = _disturb(job, chaos, rng, min(most, _KILLS_PER_JOB), Path(folder))
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        try:
            if wrong:
                wrong += "\n" + _evidence(job, Path(folder))
        finally:
            job.close()
    return chaos.kills, wrong and f"{mode}, seed {seed}, {policy}, {hosts}: {wrong}"


def _disturb(job: ElasticJob, chaos: _Chaos, rng: random.Random, most: int, folder: Path) -> str:
    if not chaos.await_generation(1, _LIMIT_S):
        return f"it did not begin: {job.finish}"
    until_s = time.monotonic() + _JOB_S
    while chaos.kills < most and time.monotonic() < until_s:
        # Soon after the others have met, or even before, or in the middle of the training.
        if not chaos.pause(rng.choice((0.05, 0.3, 1.0))):
            break
        generation, has_killed = chaos.generation, chaos.strike()
        if chaos.kills and not has_killed and job._policy.cool_down_s is None and len(job._running) <= 1:
            break
        if has_killed and rng.random() < 0.7 and not chaos.await_generation(generation + 1, _LIMIT_S):
            break
    (folder / "end").touch()
    if rng.random() < 0.3:  # in the last steps, or at the end
        chaos.pause(0.5)
        chaos.strike()
    deadline = time.monotonic() + _LIMIT_S
    while not chaos.look() or job._running:
        if time.monotonic() > deadline:
            return f"the job did not end within {_LIMIT_S:g} s"
        time.sleep(0.01)
    return _judge(job)


def _judge(job: ElasticJob) -> str:
    mode = job_mode(job)
    good = [end for end in job.ends() if not end.how]
    values = [end.outcome.value for end in good if end.outcome.value is not None]
    if not values:
        return f"nobody has come to the end: {job.finish}"
    # Some are killed, and newcomers may come too late.
    if broken := [end for end in job.ends() if end.how and "SIGKILL" not in end.how and _ENDED not in end.outcome.text]:
        return f"{broken[0].slot} {broken[0].how}\n{broken[0].outcome.text}"
    first = values[0]
    if why := trainings.samples_are_whole(first["log"]):
        return why
    wanted = trainings.expected(first["log"], not mode.startswith(("keras-tensorflow", "keras-jax", "tf_keras")))
    for value in values:
        if value["log"] != first["log"]:
            return "two ranks have different logs"
        if not (value["weights"] == wanted).all():
            return f"{(value['weights'] != wanted).sum()} weights are wrong after {len(first['log'])} steps"
        if mode != "torch-commit" and value["steps"] != len(first["log"]):
            return f"{value['steps']} steps were counted, and {len(first['log'])} done"
    return ""


def job_mode(job: ElasticJob) -> str:
    """Return the training of a job."""
    return str(job.args[0])


def _evidence(job: ElasticJob, folder: Path) -> str:
    """Return where the processes of a job are that hangs, and what it has decided."""
    with job._changed:
        pids = [one.process.pid for one in job._running.values()]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and is not reaped yet
                os.kill(pid, signal.SIGCONT)
                if (folder / f"{pid}.stacks").exists():
                    os.kill(pid, signal.SIGUSR2)
    time.sleep(1.0)
    stacks = [f"--- {pid}\n{path.read_text()}" for pid in pids if (path := folder / f"{pid}.stacks").exists()]
    decisions = [str(decision)[:300] for decision in job.decisions[-12:]]
    return "\n".join([*decisions, *stacks, job._errors()[-4000:]])


def main() -> int:
    """Kill as often as was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--frameworks", default="", help=f"of {', '.join(trainings.SERVERS)}; all when omitted")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no job after so long")
    parser.add_argument("--go-on", action="store_true", help="after something was wrong, too")
    options = parser.parse_args()
    modes = list(trainings.modes(options.frameworks))
    kills: collections.Counter[str] = collections.Counter()
    begun, seed, failures = time.monotonic(), options.seed, 0
    before: Belongings | None = None
    while kills.total() < options.kills and time.monotonic() - begun < options.seconds:
        mode = min(modes, key=lambda mode: kills[mode])
        count, wrong = _run(mode, seed, options.kills - kills.total())
        before = before or Belongings.now()
        if not wrong and (left := leaked_since(before)):
            wrong = f"{mode}, seed {seed}: {left}"
        kills[mode] += max(count, 1)
        print(f"{mode:18s} seed {seed}: {count:3d} killed, {kills.total()} in all, {time.monotonic() - begun:.0f} s",
              flush=True)  # fmt: skip
        seed += 1
        if wrong:
            failures += 1
            print(f"WRONG: {wrong}", flush=True)
            if not options.go_on:
                break
    print(", ".join(f"{mode} {count}" for mode, count in sorted(kills.items())))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
