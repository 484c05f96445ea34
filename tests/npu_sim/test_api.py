"""What this project uses of torch_npu, and how far a process gets without a device or without CANN."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.npu_sim import checks

STATUS = "from hsdp_fn_torch import npu; found, reason = npu.status(); print(found.name, '|', reason)"


@pytest.fixture(scope="module")
def one_rank() -> checks.Outcomes:
    return checks.outcomes("api_checks.py", 1)


@pytest.mark.parametrize("check", checks.names("api_checks.py"))
def test_api(one_rank: checks.Outcomes, check: str) -> None:
    one_rank.require(check)


def status(*, activate: bool, **options: str) -> str:
    """What `npu.status` finds in a process of its own, with the simulator or without."""
    first = "from tests.npu_sim import simulator; simulator.activate(); " if activate else ""
    done = subprocess.run(
        [sys.executable, "-c", first + STATUS],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **options},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


def test_without_cann_the_missing_library_is_named() -> None:
    assert status(activate=False).startswith("NO_LIBRARIES | libhccl.so: cannot open shared object file")


def test_without_a_device() -> None:
    assert status(activate=True, NPU_SIM_DEVICES="0") == "NO_DEVICE |"


def test_with_a_device() -> None:
    assert status(activate=True) == "READY |"
