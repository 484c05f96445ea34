"""The main example, run as its users run it: what it writes, that it continues exactly, and what it refuses."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "torch" / "train_gpt.py"
TINY = shlex.split(
    "--steps 10 --dim 32 --layers 2 --heads 2 --seq-len 32 --batch-size 8 --warmup 3 --corpus-bytes 2000000 "
    "--valid-every 4 --valid-windows 8 --save-every 4 --sample-bytes 4"
)
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets
LIMIT = 100  # seconds for one subprocess; about 8 are needed on an idle machine

pytestmark = pytest.mark.timeout(3 * LIMIT)


@dataclass(frozen=True)
class Finished:
    """A process that has ended."""

    code: int
    out: str
    err: str


def execute(command: list[str]) -> Finished:
    """Run to the end. A run that takes too long is asked to stop first, so that torchrun takes its workers along."""
    paths = [str(ROOT), str(SCRIPT.parent), os.environ.get("PYTHONPATH", "")]
    env = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    env["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
    with subprocess.Popen(
        command, env=env, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            out, err = process.communicate(timeout=LIMIT)
        except BaseException:
            process.terminate()
            try:
                process.communicate(timeout=40)  # torchrun gives its workers 30 s
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    return Finished(process.returncode, out, err)


def torchrun(*arguments: str | Path, processes: int = 2) -> Finished:
    """The example on this many processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return execute([*launcher, str(SCRIPT), *map(str, arguments)])


def pointer(out: Path) -> dict[str, Any]:
    return json.loads((out / "checkpoint" / "latest.json").read_text())


def saved(out: Path, rank: int) -> dict[str, Any]:
    return torch.load(out / "checkpoint" / pointer(out)["folder"] / f"rank-{rank}.pt", weights_only=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """One run of ten steps without interruption: its folder and its output."""
    out = tmp_path_factory.mktemp("whole")
    run = torchrun(*TINY, "--out", out)
    assert run.code == 0, run.err
    return out, run


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """By API, the folder of a run that was left two steps after a save, as if killed."""

    @cache
    def run(api: str) -> Path:
        out = tmp_path_factory.mktemp(api)
        stopped = torchrun(*TINY, "--out", out, "--api", api, "--stop-after", "6")
        assert stopped.code == 0, stopped.err
        return out

    return run


def test_a_run_writes_report_curve_and_checkpoint(whole: tuple[Path, Finished]) -> None:
    out, run = whole
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert (out / "report.txt").read_text().strip() in run.out
    for rank in (0, 1):
        assert saved(out, rank)["step"] == 10
    written = pointer(out)
    assert (written["step"], written["processes"], written["mesh"]) == (10, 2, "2")
    assert len(written["train"]) == 10 and written["train"][-1] < written["train"][0]
    assert [step for step, _ in written["valid"]] == [4, 8, 10]


def test_the_report_has_losses_entropy_collectives_memory_and_sample(whole: tuple[Path, Finished]) -> None:
    lines = whole[1].out.splitlines()
    for title in ("  train ", "  validation ", "  unigram entropy ", "  at rest ", "  at peak ", "sample after 'def '"):
        assert any(line.startswith(title) for line in lines), title
    (total,) = (line for line in lines if line.startswith("  total "))
    issued, expected = (side.split()[:3] for side in total.removeprefix("  total ").split("|"))
    # Three units. A step: 3 gathers forward, 2 backward, 3 reduce-scatters. Forwards: 3 validations of one batch, 4
    # bytes of the sample.
    assert issued == expected and issued[0] == str(10 * 8 + (3 + 4) * 3)
    assert total.endswith("equal, in the same order")


def assert_same_run(mine: Path, theirs: Path, processes: int = 2) -> None:
    """All losses, parameters and optimizer states of two runs are equal bit for bit."""
    for name in ("train", "valid"):
        assert pointer(mine)[name] == pointer(theirs)[name]
    for rank in range(processes):
        torch.testing.assert_close(saved(mine, rank), saved(theirs, rank), rtol=0, atol=0)


@pytest.mark.parametrize("apis", [("functional", "functional"), ("functional", "facade"), ("facade", "functional")])
def test_an_interrupted_run_continues_exactly_whichever_api_each_part_uses(
    apis: tuple[str, str], whole: tuple[Path, Finished], interrupted: Callable[[str], Path], tmp_path: Path
) -> None:
    first, second = apis
    shutil.copytree(interrupted(first), tmp_path, dirs_exist_ok=True)
    assert pointer(tmp_path)["step"] == 4
    resumed = torchrun(*TINY, "--out", tmp_path, "--api", second, "--resume")
    assert resumed.code == 0, resumed.err
    assert "continuing after step 4 of 10" in resumed.out
    assert_same_run(tmp_path, whole[0])


def test_the_facade_has_the_losses_weights_and_report_of_the_functional_api(
    whole: tuple[Path, Finished], tmp_path: Path
) -> None:
    run = torchrun(*TINY, "--out", tmp_path, "--api", "facade")
    assert run.code == 0, run.err
    assert "facade API" in run.out
    assert_same_run(tmp_path, whole[0])

    def lines(out: Path) -> list[str]:
        text = (out / "report.txt").read_text().splitlines()
        return [line for line in text if "tokens/s" not in line and not line.startswith("  at peak ")]

    assert lines(tmp_path) == lines(whole[0])
    again = torchrun(*TINY, "--out", tmp_path, "--api", "facade", "--resume", "--sample-bytes", "0")  # nothing to do
    assert again.code == 0, again.err
    assert "continuing after step 10 of 10" in again.out
    assert_same_run(tmp_path, whole[0])


@pytest.mark.parametrize(
    ("processes", "line"),
    [
        (3, "--batch-size 12 --microbatches 2"),
        (4, "--mesh 2x2 --microbatches 2 --param-dtype bfloat16 --reduce-dtype float32"),
        (2, "--microbatches 2 --sync none --param-dtype bfloat16 --reshard always --checkpoint-activations reentrant"),
    ],
)
def test_both_apis_are_equal_with_replicas_accumulation_and_mixed_precision(
    processes: int, line: str, tmp_path: Path
) -> None:
    short = shlex.split("--steps 3 --valid-every 0 --save-every 0 --sample-bytes 0")
    for api in ("functional", "facade"):
        run = torchrun(*TINY, *short, *line.split(), "--api", api, "--out", tmp_path / api, processes=processes)
        assert run.code == 0, run.err
        assert "  equal, in " in run.out
    assert_same_run(tmp_path / "facade", tmp_path / "functional", processes)


@pytest.mark.parametrize(("sync", "mesh"), [("shard", "2"), ("none", "2x1")])
def test_two_microbatches_train_as_one_does(sync: str, mesh: str, whole: tuple[Path, Finished], tmp_path: Path) -> None:
    run = torchrun(*TINY, "--out", tmp_path, "--microbatches", "2", "--sync", sync, "--mesh", mesh)
    assert run.code == 0, run.err
    assert "equal, in the same order" in run.out
    assert pointer(tmp_path)["train"] == pytest.approx(pointer(whole[0])["train"], rel=0, abs=1e-5)


def test_a_difference_from_the_prediction_is_exit_code_1(tmp_path: Path) -> None:
    # A world of one issues no collective, so a prediction of any is wrong. Such a world needs no torchrun.
    code = """if True:
        import sys, train_gpt, trainers
        from hsdp_fn import Collective
        trainers.expected_comm = lambda *_, **__: (Collective("all_gather", "", 0, "float32", 4, 2, 0),)
        sys.exit(train_gpt.main())
    """
    run = execute([sys.executable, "-c", code, *TINY, "--steps", "2", "--out", str(tmp_path)])
    assert run.code == 1, run.err
    (total,) = (line for line in run.out.splitlines() if line.startswith("  total "))
    assert total.endswith("DIFFERENT")
    assert run.err.splitlines()[-1] == "train_gpt.py: process 0: the collectives differ from the prediction"


# --- what is refused ---

TWO = {"WORLD_SIZE": "2"}
REFUSED: list[tuple[str, dict[str, str], str]] = [
    ("--steps 0", {}, "argument --steps: must be at least 1, got 0"),
    ("--steps many", {}, "argument --steps: must be a whole number, got 'many'"),
    ("--lr nan", {}, "argument --lr: must be finite and above 0, got nan"),
    ("--lr 0", {}, "argument --lr: must be finite and above 0, got 0"),
    ("--step 5", {}, "unrecognized arguments: --step 5"),
    ("--param-dtype int8", {}, "argument --param-dtype: invalid choice: 'int8'"),
    ("--reduce-dtype bf16", {}, "argument --reduce-dtype: invalid choice: 'bf16'"),
    ("--mesh 2x", {}, "argument --mesh: must be SHARD (as 2) or REPLICATExSHARD (as 2x4), got '2x'"),
    ("--mesh 2x2", TWO, "--mesh 2x2 is for 4 processes, but this run has 2 (torchrun --nproc_per_node=4"),
    ("--mesh 2", {}, "--mesh 2 is for 2 processes, but this run has 1"),
    ("--batch-size 6 --microbatches 2", TWO, "--batch-size 6 can't be divided over 2 processes and 2 microbatches"),
    ("--heads 5", {}, "dim must be a multiple of heads, got dim=32, heads=5"),
    ("--seq-len 100000000", {}, "data must have at least seq_len + 1 = 100000001 bytes"),
    ("--corpus-bytes 10", {}, "--corpus-bytes 10: too little text"),
    ("--stop-after 11", {}, "--stop-after 11 is beyond --steps 10"),
    ("--api facade --prefetch 2", {}, "--prefetch 2 needs --api functional; the facade gathers one unit ahead"),
    ("--api fsdp", {}, "argument --api: invalid choice: 'fsdp'"),
    ("--prompt=", {}, "--prompt must have at least one character"),
    ("--device npu", {}, "--device npu needs the package torch_npu, which can't be imported"),
    ("--device cuda", {"LOCAL_RANK": "99"}, "--device cuda: each process needs a device of its own"),
    ("--out FILE/run", {}, "--out FILE/run can't be made: Not a directory"),
    ("--out EMPTY --resume", {}, "--resume: the checkpoint in EMPTY doesn't exist"),
    ("--out BROKEN --resume", {}, "--resume: the checkpoint in BROKEN can't be read"),
    ("--out WHOLE --resume", {}, "WHOLE was written by 2 processes (mesh 2), but this run has 1 (mesh 1)"),
    ("--out WHOLE --resume --mesh 2x1", TWO, "2 processes (mesh 2), but this run has 2 (mesh 2x1)"),
    ("--out WHOLE --resume --dim 64 --lr 1", TWO, "another configuration: dim is 32 there, 64 here; lr is 0.003 there"),
    ("--out WHOLE --resume --stop-after 10", TWO, "--stop-after 10: the checkpoint is of step 10 already"),
    ("--out TORN --resume", TWO, "rank-0.pt can't be read"),
]


@pytest.fixture(scope="module")
def answers(whole: tuple[Path, Finished], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, str]]:
    """Exit code and standard error for each command line of `REFUSED`, all from one process, as ``main`` returns."""
    folder = tmp_path_factory.mktemp("refused")
    (folder / "FILE").write_text("")
    (folder / "BROKEN" / "checkpoint").mkdir(parents=True)
    (folder / "BROKEN" / "checkpoint" / "latest.json").write_text("{")
    (folder / "WHOLE").symlink_to(whole[0])
    torn = folder / "TORN" / "checkpoint"
    (torn / pointer(whole[0])["folder"]).mkdir(parents=True)
    (torn / "latest.json").write_text(json.dumps(pointer(whole[0])))
    (torn / pointer(whole[0])["folder"] / "rank-0.pt").write_bytes(b"half of a file")
    code = """if True:
        import contextlib, io, json, os, sys
        import train_gpt
        sys.modules["torch_npu"] = None  # not importable, also where it is installed
        train_gpt.time.sleep = lambda seconds: None
        tiny, cases = json.loads(sys.argv[1])
        os.chdir(sys.argv[2])
        out = []
        for line, environment in cases:
            for name in ("WORLD_SIZE", "LOCAL_RANK"):
                os.environ.pop(name, None)
            os.environ.update(environment)
            with contextlib.redirect_stderr(io.StringIO()) as err:
                out.append((train_gpt.main([*tiny, *line.split()]), err.getvalue()))
        print(json.dumps(out))
    """
    cases = [(line, environment) for line, environment, _ in REFUSED]
    run = execute([sys.executable, "-c", code, json.dumps([TINY, cases]), str(folder)])
    assert run.code == 0, run.err
    return dict(zip([line for line, _, _ in REFUSED], json.loads(run.out), strict=True))


@pytest.mark.parametrize(("line", "message"), [(line, message) for line, _, message in REFUSED])
def test_what_cannot_be_run_is_refused_in_one_line(
    line: str, message: str, answers: dict[str, tuple[Any, str]]
) -> None:
    code, err = answers[line]
    assert code == 2
    assert err.startswith("train_gpt.py: error: ") and err.count("\n") == 1
    assert message in err


def test_a_refusal_without_torchrun_is_one_line_and_exit_code_2() -> None:
    run = execute([sys.executable, str(SCRIPT), "--steps", "-3"])
    assert run == Finished(2, "", "train_gpt.py: error: argument --steps: must be at least 1, got -3\n")


def test_a_refusal_under_torchrun_is_one_line_from_each_process(tmp_path: Path) -> None:
    run = torchrun(*TINY, "--out", tmp_path, "--batch-size", "3")
    assert run.code != 0
    lines = [line for line in run.err.splitlines() if "train_gpt.py: error:" in line]
    message = "--batch-size 3 can't be divided over 2 processes and 1 microbatches; it must be a multiple of 2"
    assert lines == [f"train_gpt.py: error: {message}"] * 2
    assert "exitcode  : 2 " in run.err
    assert f'File "{SCRIPT}"' not in run.err  # the only traceback is torchrun's own
