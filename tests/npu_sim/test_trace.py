"""The order in which streams are made to wait, read from the trace: of one collective, and of this library's FSDP."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.npu_sim.checks import FOLDER
from tests.npu_sim.run import run_ranks

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    folder = tmp_path_factory.mktemp("traces")
    options = {"NPU_SIM_TRACE": f"{folder}/%r.txt", "NPU_SIM_DELAY_US": "200"}
    ended = run_ranks([FOLDER / "order_script.py"], 2, options=options, capture=True)
    assert [rank.code for rank in ended] == [0, 0], ended
    return [Path(folder, f"{rank}.txt").read_text().splitlines() for rank in range(2)]


def section(trace: list[str], name: str) -> list[str]:
    return trace[trace.index(f"note begin {name}") + 1 : trace.index(f"note end {name}")]


def asked_for(lines: Iterable[str]) -> list[str]:
    """What the program asked for, with streams and events named in the order of their first appearance."""
    names: dict[str, str] = {}

    def renamed(match: re.Match[str]) -> str:
        kind, key = match["kind"], match[0]
        return names.setdefault(key, f"{kind}{1 + sum(name.startswith(kind) for name in names.values())}")

    pattern = r"(?P<kind>stream|event)=\d+( generation=\d+)?"
    kept = (line for line in lines if line.split()[0] in ("record", "wait", "collective"))
    return [re.sub(r"communicator=\S+ ", "", re.sub(pattern, renamed, line)) for line in kept]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_collective_and_the_current_stream_wait_for_each_other(traces: list[list[str]], rank: int) -> None:
    lines = section(traces[rank], "all_gather")
    assert asked_for(lines) == [
        "record stream1 event1",
        "wait stream2 event1",
        "collective stream2 call=all_gather of 3 fp32",
        "record stream2 event2",
        "record stream2 event3",
        "wait stream1 event3",
    ]
    at = {re.sub(r"(stream|task)=\d+ ?", "", line).strip(): i for i, line in enumerate(lines)}
    gathered = next(i for i, line in enumerate(lines) if "name=all_gather" in line)
    assert gathered < at["start name=add_.Tensor"]


@pytest.mark.parametrize("rank", [0, 1])
def test_fsdp_orders_each_collective_after_its_input_and_waits_for_it(traces: list[list[str]], rank: int) -> None:
    """Two layers, each a root of its own, so that nothing is gathered again in backward."""
    lines = asked_for(section(traces[rank], "training"))
    at = [i for i, line in enumerate(lines) if line.startswith("collective stream2")]
    kinds = [lines[i].partition("call=")[2] for i in at]
    assert kinds == ["all_gather of 8 fp32"] * 2 + ["reduce_scatter of 8 fp32 (sum)"] * 2
    for here, following in zip(at, [*at[1:], len(lines)], strict=True):
        filled = lines[here - 1].removeprefix("wait stream2 ")
        assert lines[here - 2] == f"record stream1 {filled}"
        records = [line for line in lines[here:following] if line.startswith("record stream2")]
        assert any(line.replace("record stream2", "wait stream1") in lines[here:] for line in records)
