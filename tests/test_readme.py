"""The README's first program runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_fifteen_lines_train_on_two_processes(tmp_path: Path) -> None:
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert block is not None
    script = tmp_path / "train.py"
    script.write_text(block[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"^loss ([\d.]+)$", done.stdout, re.M)]
    assert len(losses) == 2, done.stdout
    assert all(loss < 0.5 for loss in losses), losses  # the data's variance is 1
    assert "HSDPState step 200, microbatch 0" in done.stdout
