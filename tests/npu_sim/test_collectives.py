"""``torch.distributed`` with backend ``hccl`` over the simulator, against computed values."""

from __future__ import annotations

import pytest

from tests.npu_sim import checks

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", params=[2, 4], ids=lambda ranks: f"{ranks}ranks")
def collectives(request: pytest.FixtureRequest) -> checks.Outcomes:
    return checks.outcomes("collective_checks.py", request.param, NPU_SIM_DELAY_US="300", NPU_SIM_TIMEOUT_S="30")


@pytest.mark.parametrize("check", checks.names("collective_checks.py"))
def test_collectives(collectives: checks.Outcomes, check: str) -> None:
    collectives.require(check)


def test_failures_are_exceptions_and_then_the_watchdog_ends_the_processes() -> None:
    found = checks.outcomes("fault_checks.py", 2, TASK_QUEUE_ENABLE="0")
    for check in checks.names("fault_checks.py"):
        found.require(check)
    for rank in found.ranks:
        assert rank.code not in (None, 0)
        assert "got ERROR via HcclGetCommAsyncError" in rank.output
