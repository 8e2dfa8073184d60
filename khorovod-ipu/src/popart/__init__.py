"""The programming interface of PopART over a device in software: graphs are ONNX, torch executes and differentiates."""

from __future__ import annotations

from khorovod_ipu.guard import refuse_beside_the_sdk

refuse_beside_the_sdk()
