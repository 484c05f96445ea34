"""Training on device ``npu`` over the simulator: torch's FSDP2 and this library."""

from __future__ import annotations

import pytest

from tests.npu_sim import checks

pytestmark = pytest.mark.timeout(400)

ALL = checks.names("training_checks.py")
#: On four ranks the mesh is 2 x 2: replicas of shards. The kinds of training are enough there.
HSDP = [
    "fsdp2_of_torch_equals_a_single_process",
    "fully_shard_equals_gloo_and_a_single_process",
    "functional_training_equals_gloo_and_a_single_process",
]
#: With these, a missing wait and a use after free give other values than what is right.
STRICT = {"NPU_SIM_STRICT_MEMORY": "1", "NPU_SIM_DELAY_US": "400", "NPU_SIM_SEED": "1"}


def train(ranks: int, *only: str, **options: str) -> checks.Outcomes:
    return checks.outcomes("training_checks.py", ranks, *only, limit_s=300.0, GLOO_SOCKET_IFNAME="lo", **options)


@pytest.fixture(scope="module")
def two_ranks() -> checks.Outcomes:
    return train(2)


@pytest.fixture(scope="module")
def two_strict_ranks() -> checks.Outcomes:
    return train(2, **STRICT)


@pytest.fixture(scope="module")
def four_ranks() -> checks.Outcomes:
    return train(4, *HSDP, NPU_SIM_DELAY_US="400")


@pytest.mark.parametrize("check", ALL)
def test_training(two_ranks: checks.Outcomes, check: str) -> None:
    two_ranks.require(check)


@pytest.mark.parametrize("check", ALL)
def test_training_with_strict_memory_and_delays(two_strict_ranks: checks.Outcomes, check: str) -> None:
    two_strict_ranks.require(check)


@pytest.mark.parametrize("check", HSDP)
def test_training_of_replicas_of_shards(four_ranks: checks.Outcomes, check: str) -> None:
    four_ranks.require(check)
