"""The benchmark runs and writes what it promises; timings are not judged, as no test machine has a constant speed."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The numbers and the printed table of one quick run."""
    path = tmp_path_factory.mktemp("benchmark") / "numbers.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "step.py"), "--quick", "--size", "unit", "--size", "overhead"]
    done = subprocess.run([*command, "--json", str(path)], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text()), done.stdout


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number in nested dicts, with the keys that lead to it; flags aren't numbers."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from numbers(item, f"{path}/{key}")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, value


@pytest.mark.parametrize("key", ["cpu_ratio", "wall_ratio", "wall_over_floor", "peak_bytes_ratio", "unit_cost_ratio"])
def test_overhead_has_each_ratio_finite_and_positive(run: tuple[dict[str, Any], str], key: str) -> None:
    value = run[0]["overhead"][key]
    assert math.isfinite(value)
    assert value > 0


@pytest.mark.parametrize(
    "key", ["cpu_ratio", "wall_ratio", "peak_bytes_ratio", "cpu_ratio_to_ours", "wall_ratio_to_ours"]
)
def test_the_facade_has_each_ratio_finite_and_positive(run: tuple[dict[str, Any], str], key: str) -> None:
    value = run[0]["overhead"]["facade"][key]
    assert math.isfinite(value)
    assert value > 0


def test_every_number_written_is_finite(run: tuple[dict[str, Any], str]) -> None:
    assert [path for path, value in numbers(run[0]) if not math.isfinite(value)] == []


def test_every_time_and_size_is_positive(run: tuple[dict[str, Any], str]) -> None:
    report, _ = run
    measured = [*numbers(report["overhead"]["contenders"]), *numbers(report["unit"]["buffers"])]
    measured += [(who, c["total"]) for who, c in report["unit"]["cost"].items()]
    counts = "/collectives/"
    assert [path for path, value in measured if value <= 0 and counts not in path] == []


def test_losses_and_collectives_are_those_of_fsdp2(run: tuple[dict[str, Any], str]) -> None:
    report, _ = run
    assert report["overhead"]["losses_equal"]
    assert report["overhead"]["collectives_equal"]
    for who in ("ours", "facade"):
        assert report["overhead"]["contenders"][who]["collectives"] == {"all_gather": 25, "reduce_scatter": 13}


def test_the_table_names_every_contender(run: tuple[dict[str, Any], str]) -> None:
    for name in ("ours", "facade", "fsdp2", "fsdp2 prefetch", "floor"):
        assert run[1].count(f"  {name} ") >= 2, name
