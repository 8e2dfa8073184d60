"""PopRun in software: starts the instances of a program, and tells each which replicas of the job are its own."""

from __future__ import annotations

from khorovod_ipu.guard import refuse_beside_the_sdk

refuse_beside_the_sdk()
