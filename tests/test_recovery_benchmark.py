"""The benchmark of what is left after a failure runs, and this library is right in all of it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_a_quick_run_is_right_everywhere() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "recovery.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    found = re.fullmatch(r"recovery: (\d+)/(\d+)", lines[-1])
    assert found is not None, lines[-1]
    assert found[1] == found[2]
    assert int(found[2]) > 80  # the scenarios of both APIs, and the injected failures
    assert not any(line.startswith("NOT RIGHT") for line in lines)
    # The comparison has both sides: torch is right after a failure in forward, and not after one in backward.
    assert next(line for line in lines if line.startswith("exception in forward")).split()[-3:] == ["right"] * 3
    assert "WRONG" in next(line for line in lines if line.startswith("exception in backward"))
