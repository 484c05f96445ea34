"""The simulated runtime: memory, streams, events, faults, and what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.npu_sim import checks
from tests.npu_sim.build import generated_symbols, libraries
from tests.npu_sim.run import run_ranks

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def runtime() -> checks.Outcomes:
    return checks.outcomes("runtime_checks.py", 1, active=False, NPU_SIM_MEMORY_MIB="16")


@pytest.mark.parametrize("check", checks.names("runtime_checks.py"))
def test_runtime(runtime: checks.Outcomes, check: str) -> None:
    runtime.require(check)


def run_plain(code: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, since it is to abort."""
    head = "from tests.npu_sim.bare import *; import ctypes; lib = Library(); lib.aclrtSetDevice(0)\n"
    root = Path(__file__).parents[2]
    return subprocess.run([sys.executable, "-c", head + code], cwd=root, capture_output=True, text=True, check=False)


def test_a_function_that_is_not_simulated_aborts_with_its_name() -> None:
    assert "rtKernelLaunch" in generated_symbols(libraries())
    done = run_plain("lib.rtKernelLaunch()")
    assert done.returncode < 0
    assert "npu_sim: rtKernelLaunch isn't simulated" in done.stderr


def test_an_operator_that_is_not_simulated_is_refused_with_its_name() -> None:
    done = run_plain("lib.aclopCompileAndExecute(b'Conv2D', 0, None, None, 0, None, None, None, 0, 0, None, None)")
    assert "the operator Conv2D isn't simulated" in done.stderr


def test_a_write_after_free_aborts() -> None:
    free = "block = lib.allocate(8); lib.aclrtFree(block);"
    done = run_plain(f"{free} ctypes.memset(block, 0, 1); lib.npu_sim_check_freed()")
    assert done.returncode < 0
    assert "byte 0 of the 8" in done.stderr and "was written after aclrtFree" in done.stderr


def test_an_unknown_fault_is_not_ignored() -> None:
    done = run_plain("lib.npu_sim_arm(b'bug@1')")
    assert 'no fault is called "bug"' in done.stderr


def test_ranks_are_killed_when_their_time_is_up(tmp_path: Path) -> None:
    script = Path(tmp_path, "sleeper.py")
    script.write_text("import os, time\nprint(os.environ['RANK'])\nif os.environ['RANK'] == '0':\n    time.sleep(60)\n")
    ended = run_ranks([script], 2, limit_s=3.0, capture=True, active=False)
    assert [(rank.code, rank.output) for rank in ended] == [(None, "0\n"), (0, "1\n")]
