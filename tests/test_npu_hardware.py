"""The checks of training on ``npu`` (`tests/npu_sim/on_ranks`), on real NPUs: ``pytest -m npu``. Never run so far.

Where no NPU is found these tests fail instead of being skipped: who asks for them wants to know.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hsdp_fn_torch import npu
from tests.npu_sim import checks
from tests.npu_sim.run import Ended

pytestmark = [pytest.mark.npu, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parent.parent
#: Losses near 1; the device's kernels round otherwise than the CPU's.
TOLERANCE = "1e-3"


def launched(folder: Path, ranks: int) -> checks.Outcomes:
    """The checks on so many NPUs of this machine, by torchrun."""
    npu.require("pytest -m npu")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
        *("--redirects", "3", "--log-dir", str(folder), str(checks.FOLDER / "training_checks.py")),
    ]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "HSDP_NPU_TOLERANCE": TOLERANCE}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    logs = [sorted(folder.glob(f"*/attempt_0/{rank}/std*.log")) for rank in range(ranks)]
    assert all(logs), done.stderr[-3000:]
    return checks.Outcomes(
        [
            Ended(rank, done.returncode, "\n".join(path.read_text(errors="replace") for path in paths))
            for rank, paths in enumerate(logs)
        ]
    )


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> checks.Outcomes:
    return launched(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> checks.Outcomes:
    return launched(tmp_path_factory.mktemp("four"), 4)


@pytest.mark.parametrize("check", checks.names("training_checks.py"))
def test_on_two_npus(two: checks.Outcomes, check: str) -> None:
    two.require(check)


@pytest.mark.parametrize("check", checks.names("training_checks.py"))
def test_replicas_of_shards_on_four_npus(four: checks.Outcomes, check: str) -> None:
    four.require(check)
