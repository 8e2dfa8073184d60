"""The packages use khorovod by what it makes public."""

from __future__ import annotations

import pytest
from sources import Module, ipu_modules

#: Modules of khorovod that may be imported here; more specific than a binding is nobody's promise.
PUBLIC = (
    "horovod", "horovod.errors", "horovod.torch", "horovod.numpy", "horovod.tensorflow", "horovod.keras",
    "horovod.tensorflow.keras", "horovod.popart",
)  # fmt: skip
#: Programs over the launcher need more of it than `horovod.run`.
LAUNCHERS = ("poprun",)
#: Code that waits for other processes takes its limits from the settings.
SETTINGS = ("khorovod_ipu.tensorflow.cluster", "khorovod_ipu.tensorflow.ring")


def breaches(module: Module) -> list[str]:
    """Every import of a room of khorovod, as place and name."""
    inner = (
        ("horovod.launch", "horovod.config", "horovod.world", "horovod.cgroups")
        if module.name.startswith(LAUNCHERS)
        else ("horovod.config",)
        if module.name in SETTINGS
        else ()
    )
    return [
        f"{module.place}:{imported.line} {imported.target}"
        for imported in module.imports()
        if imported.target.split(".")[0] == "horovod"
        and imported.target not in PUBLIC
        and not imported.target.startswith(inner or ("-",))
    ]


@pytest.mark.parametrize("name", sorted(ipu_modules()))
def test_khorovod_is_used_by_what_it_makes_public(name: str) -> None:
    assert not breaches(ipu_modules()[name])
