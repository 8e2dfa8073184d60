"""Benchmarks of a checkout: frameworks other than torch, and costs that concern khorovod's developers."""

from __future__ import annotations
