"""The README's programs run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


@pytest.mark.parametrize(
    ("block", "says"),
    [
        (0, "HSDPState step 200, microbatch 0"),
        (1, "HSDPState step 199, microbatch 1"),
    ],  # the last step isn't noticed yet
    ids=["functional", "facade"],
)
def test_the_programs_train_on_two_processes(tmp_path: Path, block: int, says: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(BLOCKS[block])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"loss (\d\.\d{4})", done.stdout)]  # lines of the two may run together
    assert len(losses) == 2, done.stdout
    assert all(loss < 0.5 for loss in losses), losses  # the data's variance is 1
    assert says in done.stdout


def test_every_program_is_run() -> None:
    assert len(BLOCKS) == 2
