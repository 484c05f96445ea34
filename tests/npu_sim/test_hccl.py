"""The simulated HCCL at its C interface: what it refuses, and how it fails."""

from __future__ import annotations

import pytest

from tests.npu_sim import checks

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def hccl() -> checks.Outcomes:
    return checks.outcomes("hccl_checks.py", 2, active=False, NPU_SIM_TIMEOUT_S="2")


@pytest.mark.parametrize("check", checks.names("hccl_checks.py"))
def test_hccl(hccl: checks.Outcomes, check: str) -> None:
    hccl.require(check)
