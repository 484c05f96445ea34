"""Holds a device's stream until a test lets it go on: what comes later is then certain, not a matter of sleeping."""

from __future__ import annotations

import threading

import torch

from tests.npu_sim.aten import launch


def gate(device: torch.device | None = None) -> threading.Event:
    """Hold the current stream of the device (the current one) here until the event is set, ten seconds at most."""
    opened = threading.Event()
    launch("gate", device or torch.device("npu", torch.npu.current_device()), lambda: opened.wait(10.0))
    return opened
