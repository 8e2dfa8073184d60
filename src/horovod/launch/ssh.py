"""The command line of ssh, or of the scheduler, that starts an agent, and explanations of its errors. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Access", "command_line", "diagnose"]

AGENT = "horovod.launch.agent"
_NO_COMMAND, _NOT_EXECUTABLE, _SSH_FAILED = 127, 126, 255
_MOST_QUOTED = 400
#: Messages of srun for a step of one node, if the job has asked for a number of GPUs on all nodes together.
_GPUS_OF_ALL_NODES = ("Invalid generic resource (gres) specification", "SLURM_NTASKS_PER_GPU")
#: Limit for sshd to answer; the login shell and Python may take longer after that.
_CONNECT_S = 30


@dataclass(frozen=True)
class Access:
    """How to reach other hosts, and what must exist there."""

    python: str  # program that runs the agent there
    port: int = 0  # port of sshd; 0 leaves it to ssh
    identity_file: str = ""  # private key; empty leaves it to ssh
    timeout_s: float = 30.0  # for all checks together, in seconds; sshd must answer within 30 s
    interfaces: tuple[str, ...] = ()  # names of network interfaces that each host must have
    command: str = ""  # program that the ranks run
    path: str = ""  # value of PATH, for the search of the program there
    # first words of a command line that starts a program there instead of ssh, by host name
    starters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def flags(self) -> list[str]:
        """Port and key as flags of ssh."""
        port = ["-p", str(self.port)] if self.port else []
        return port + (["-i", self.identity_file] if self.identity_file else [])


def command_line(host: str, access: Access) -> list[str]:
    """Return the command that starts an agent on ``host``, a name, an address, or ``user@name``.

    It asks nothing, trusts no unknown key, and overrides the configuration of forwarding, terminals and sessions.
    """
    if host in access.starters:
        return [*access.starters[host], access.python, "-m", AGENT]
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": str(max(1, min(_CONNECT_S, round(access.timeout_s)))),
        # Ends ssh when the host vanishes. While ssh logs in, it waits so long for each answer of sshd.
        "ServerAliveInterval": str(_CONNECT_S // 3),
        "ServerAliveCountMax": "3",
        "ClearAllForwardings": "yes",
        "ForwardX11": "no",
        "RequestTTY": "no",
        "RemoteCommand": "none",
        "IgnoreUnknown": "*",  # OpenSSH below 8.7 does not know the next two
        "StdinNull": "no",
        "SessionType": "default",
        # Else the user's other sessions over this connection would end with the job.
        "ControlMaster": "no",
        "LogLevel": "ERROR",
    }
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return ["ssh", "-T", *words, *access.flags, "--", host, f"exec {shlex.quote(access.python)} -m {AGENT}"]


def diagnose(host: str, access: Access, status: int | None, stderr: str, noise: str = "") -> str:
    """Return a sentence: why there is no agent on ``host``, and what to do. ``status`` is None when ssh was still
    trying; ``noise`` is text on standard output in place of an agent's frames.
    """
    lines = [text.strip().splitlines()[-1].strip() for text in (stderr, noise) if text.strip()]
    fatal = re.search(r"^Fatal Python error: .*|^.*Bad configuration option.*|^.* line \d+: Bad .*", stderr, re.M)
    last = fatal[0].strip() if fatal else "; ".join(lines)[:_MOST_QUOTED] if lines else f"exit code {status}"
    starter = access.starters.get(host, ())
    try_it = " ".join(starter or ["ssh", *access.flags, host])
    if status in (_NO_COMMAND, _NOT_EXECUTABLE):
        return (
            f"{host}: there is no Python at {access.python}; install it there at the same path, or name one that all "
            f"hosts have with --python"
        )
    if re.search(rf"No module named '?{AGENT.split('.')[0]}", stderr):
        return (
            f"{host}: {access.python} has no khorovod, or one too old for jobs of several hosts; install the version "
            f"that is here with {access.python} -m pip install, there"
        )
    if status is None:
        return (
            f"{host} did not answer within {access.timeout_s:g} s{f' ({last})' if lines else ''}; see whether "
            f"`{try_it} true` ends, or give more time with --start-timeout"
        )
    if starter and any(mark in stderr for mark in _GPUS_OF_ALL_NODES):
        return f"{host}: srun could not start an agent there ({last}); ask Slurm for --gpus-per-node, not for --gpus"
    if starter:
        return f"{host}: {starter[0]} could not start an agent there ({last}); see what `{try_it} hostname` says"
    tried = re.search(r"port (\d+)", last)
    port = tried[1] if tried else access.port or 22
    changed = re.search(r"Host key for (\S+) has changed", stderr)
    known = shlex.quote(changed[1]) if changed else host
    for marks, text in _MEANINGS:
        if status == _SSH_FAILED and any(mark in stderr for mark in marks):
            return f"{host}: " + text.format(host=host, try_it=try_it, port=port, last=last, known=known)
    if status == _SSH_FAILED and not lines:
        return (
            f"{host}: ssh ended without a message, as it does if sshd does not answer for {_CONNECT_S} s, allows no "
            f"session (MaxSessions, ChrootDirectory), or has no kind of key in common; see what `{try_it}` says"
        )
    if not lines and status in range(_NOT_EXECUTABLE):
        return (
            f"{host}: the login shell ended with exit code {status} and without a message before Python began; "
            f"see whether `{try_it} true` does the same: a start file such as ~/.bashrc may end it there"
        )
    if noise.strip() and status in range(_NOT_EXECUTABLE):
        last += "; perhaps ForceCommand in sshd_config, command= in authorized_keys, or nologin as shell runs instead"
    return f"{host}: no agent could be started ({last}); see what `{try_it} {access.python} -m {AGENT}` says"


_MEANINGS: Sequence[tuple[tuple[str, ...], str]] = (
    (("bad configuration option",), "the configuration of ssh on this host cannot be read ({last}); correct that line"),
    (("No user exists for uid",), "ssh does not run on this host ({last}); give that user a name in /etc/passwd"),
    (
        ("Could not resolve hostname", "Name or service not known"),
        "the name is unknown; correct it, or add it to DNS, /etc/hosts or ~/.ssh/config",
    ),
    (
        ("REMOTE HOST IDENTIFICATION HAS CHANGED",),
        "its host key is not the one in known_hosts; if the machine was set up anew, `ssh-keygen -R {known}` forgets "
        "the old key, then `{try_it}` shows the new one",
    ),
    (
        ("Host key verification failed", "host key is known for"),
        "its host key is unknown; run `{try_it}` once and compare the fingerprint, or add the key to known_hosts",
    ),
    (
        ("password", "keyboard-interactive"),
        "it wants a password, which horovodrun never asks for; give it your key with `ssh-copy-id {host}`",
    ),
    (
        ("Permission denied", "Too many authentication failures"),
        "it refused the key ({last}); name the right one with -i, or the user as in user@host; add the public key to "
        "~/.ssh/authorized_keys there; or, if the key has a passphrase, hand it to ssh-agent with ssh-add",
    ),
    (("Connection refused",), "nothing listens on port {port}; start sshd there, or name its port with -p"),
    (
        ("No route to host", "Network is unreachable", "timed out", "Connection reset", "Connection closed"),
        "it cannot be reached ({last}); see whether the machine is up and a firewall lets port {port} through",
    ),
)
