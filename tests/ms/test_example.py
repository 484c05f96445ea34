"""The example saves and goes on, run as its users run it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--dim", "16", "--layers", "1", "--heads", "2", "--seq-len", "16", "--batch-size", "2", "--log-every", "2"]


def run(*arguments: str | Path, code: int = 0) -> str:
    """What the example prints."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOG_v": "3"}
    command = [sys.executable, str(ROOT / "examples" / "mindspore" / "train_gpt.py"), *TINY, *map(str, arguments)]
    ended = subprocess.run(command, env=env, text=True, capture_output=True, timeout=250)
    assert ended.returncode == code, ended.stderr
    return ended.stdout if code == 0 else ended.stderr


def test_a_resumed_run_ends_as_the_one_that_went_on(tmp_path):
    run("--steps", 4, "--save", tmp_path / "a", "--save-every", 2)
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["step-000002", "step-000004"]
    shutil.copytree(tmp_path / "a" / "step-000002", tmp_path / "b" / "step-000002")
    text = run("--steps", 4, "--save", tmp_path / "b", "--resume", tmp_path / "b", "--seed", 7)  # the saved one counts
    assert f"goes on from {tmp_path / 'b' / 'step-000002'}" in text and "step    4" in text
    files = sorted((tmp_path / "a" / "step-000004").rglob("*.safetensors"))
    assert len(files) == 4
    for file in files:
        ours, theirs = load_file(file), load_file(tmp_path / "b" / file.relative_to(tmp_path / "a"))
        assert ours.keys() == theirs.keys() and all((theirs[name] == value).all() for name, value in ours.items())
    assert "step    6" in run("--steps", 6, "--resume", tmp_path / "a", "--processes", 1, "--api", "facade")
    assert "is ahead of step 0" in run("--steps", 2, "--save", tmp_path / "a", "--processes", 1, code=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--save-every", "2"], "--save-every needs --save DIR"), (["--resume", "/nowhere"], "no checkpoint in /nowhere")],
)
def test_what_the_command_line_cannot_mean_is_refused(arguments, message):
    assert message in run(*arguments, code=2)


def test_it_runs_under_msrun(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOG_v": "3"}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"  # workers are started with `python`
    script = [str(ROOT / "examples" / "mindspore" / "train_gpt.py"), *TINY, "--steps", "2", "--api", "facade"]
    workers = [
        "--worker_num=2",
        "--local_worker_num=2",
        f"--master_port={port}",
        f"--log_dir={tmp_path}",
        "--join=True",
    ]
    command = [str(Path(sys.executable).parent / "msrun"), *workers, *script]
    ended = subprocess.run(command, env=env, text=True, capture_output=True, timeout=200, cwd=tmp_path)
    log = (tmp_path / "worker_0.log").read_text()
    assert ended.returncode == 0, log
    assert "step    2" in log and "a step issues 2 reduce_scatter" in log
