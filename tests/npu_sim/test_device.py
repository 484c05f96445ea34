"""Device ``npu`` over the simulator: order, devices, ops, randomness, failures, a whole net, strict memory."""

from __future__ import annotations

import pytest

from tests.npu_sim import checks

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def device() -> checks.Outcomes:
    return checks.outcomes("device_checks.py", 1, NPU_SIM_DEVICES="2")


@pytest.mark.parametrize("check", checks.names("device_checks.py"))
def test_device(device: checks.Outcomes, check: str) -> None:
    device.require(check)


@pytest.fixture(scope="module")
def strict() -> checks.Outcomes:
    return checks.outcomes("memory_checks.py", 1, NPU_SIM_STRICT_MEMORY="1")


@pytest.mark.parametrize("check", checks.names("memory_checks.py"))
def test_strict_memory(strict: checks.Outcomes, check: str) -> None:
    strict.require(check)
