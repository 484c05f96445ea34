"""This library on device ``npu``, backend ``hccl``, over the simulator: equal to gloo, in order, safe when it fails."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from tests.npu_sim import checks
from tests.npu_sim.on_ranks.library_table import WAITS
from tests.npu_sim.run import run_ranks

pytestmark = pytest.mark.timeout(400)

#: With these, a missing wait and a use after free give other values than what is right.
STRICT = {"NPU_SIM_STRICT_MEMORY": "1", "NPU_SIM_DELAY_US": "200"}
FEATURES = [name for name in checks.names("library_checks.py") if not name.startswith("hsdp")]
HSDP = [name for name in checks.names("library_checks.py") if name.startswith("hsdp")]


def launch(script: str, ranks: int, *only: str, **options: str) -> checks.Outcomes:
    return checks.outcomes(script, ranks, *only, limit_s=300.0, GLOO_SOCKET_IFNAME="lo", **options)


# --------------------------------------------------------------------------------------------------------------- values


@pytest.fixture(scope="module")
def two_ranks() -> checks.Outcomes:
    return launch("library_checks.py", 2, *FEATURES, **STRICT)


@pytest.fixture(scope="module")
def four_ranks() -> checks.Outcomes:
    return launch("library_checks.py", 4, *HSDP, **STRICT)


@pytest.mark.parametrize("check", FEATURES)
def test_equal_to_gloo(two_ranks: checks.Outcomes, check: str) -> None:
    two_ranks.require(check)


@pytest.mark.parametrize("check", HSDP)
def test_equal_to_gloo_on_replicas_of_shards(four_ranks: checks.Outcomes, check: str) -> None:
    four_ranks.require(check)


# ---------------------------------------------------------------------------------------------------------------- order

#: How torch_npu keeps the memory of collectives, where it queues, and how many runs. Strict memory has no task queue.
SETTINGS = {
    "MULTI_STREAM_MEMORY_REUSE=0": (STRICT, 70),
    "MULTI_STREAM_MEMORY_REUSE=1": (STRICT, 70),
    "MULTI_STREAM_MEMORY_REUSE=2": (STRICT, 70),
    "TASK_QUEUE_ENABLE=0": ({}, 18),
    "TASK_QUEUE_ENABLE=1": ({}, 18),
    "TASK_QUEUE_ENABLE=2": ({}, 18),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_many_runs_with_other_delays_in_each(setting: str) -> None:
    """More than 200 of them with strict memory."""
    name, _, value = setting.partition("=")
    memory, runs = SETTINGS[setting]
    options = {**memory, "NPU_SIM_DELAY_US": "400", "NPU_SIM_SEED": str(list(SETTINGS).index(setting)), name: value}
    outcomes = launch("library_runs.py", 2, LIBRARY_RUNS=str(runs), **options)
    outcomes.require("runs")
    print(f"{setting}: {runs} runs")


@pytest.fixture(scope="module")
def orders() -> checks.Outcomes:
    return launch("library_orders.py", 2, NPU_SIM_STRICT_MEMORY="1", NPU_SIM_DELAY_US="800")


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_is_needed_or_known_to_be_spare(orders: checks.Outcomes, wait: str) -> None:
    orders.require(wait)


# ---------------------------------------------------------------------------------------------------------------- trace


@dataclass
class Step:
    """A step of `library_trace.py`: the lines of its trace, and where in them collectives and kernels are."""

    lines: list[str]

    def note(self, text: str) -> int:
        return self.lines.index(f"note {text}")

    def issued(self, collective: str) -> list[int]:
        return [i for i, line in enumerate(self.lines) if line.startswith("coll") and f"call={collective} " in line]

    def streams(self, collective: str) -> set[str]:
        return {re.search(r"stream=(\d+)", self.lines[i])[1] for i in self.issued(collective)}

    def started(self, name: str) -> list[int]:
        pattern = re.compile(rf"start .* name={name}( |$)")
        return [i for i, line in enumerate(self.lines) if pattern.match(line)]

    def ended(self, name: str) -> list[int]:
        return [
            self.lines.index(self.lines[i].partition(" name=")[0].replace("start", "end")) for i in self.started(name)
        ]


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Step]:
    folder = tmp_path_factory.mktemp("traces")
    options = {"NPU_SIM_TRACE": f"{folder}/%r.txt", "NPU_SIM_DELAY_US": "200"}
    ended = run_ranks([checks.FOLDER / "library_trace.py"], 2, options=options, capture=True)
    assert [rank.code for rank in ended] == [0, 0], ended
    found = {}
    for rank in range(2):
        trace = Path(folder, f"{rank}.txt").read_text().splitlines()
        for name in ("one group", "two groups"):
            lines = trace[trace.index(f"note begin {name}") : trace.index(f"note end {name}")]
            found[name, rank] = Step(lines)
    return found


on_each = pytest.mark.parametrize(("groups", "rank"), [(g, r) for g in ("one group", "two groups") for r in range(2)])
#: In which order the three layers are gathered: forward, then backward. Each has one mm in forward, two in backward.
GATHERED = [("forward", 0), ("forward", 1), ("forward", 2), ("backward", 2), ("backward", 1), ("backward", 0)]


@on_each
def test_the_next_layer_is_gathered_beside_the_compute_of_the_present_one(
    steps: dict[tuple[str, int], Step], groups: str, rank: int
) -> None:
    step = steps[groups, rank]
    issued, ended = step.issued("all_gather"), step.ended("all_gather")
    assert len(issued) == len(ended) == len(GATHERED)
    computes = step.started("mm")
    first_of_layer = [0, 1, 2, 3, 5, 7]
    for present, following in zip(range(6), range(1, 6), strict=False):
        if following == 3:
            continue  # backward begins with a gather that nothing could be beside
        what = "{} {}".format(*GATHERED[present])
        assert issued[following] < step.note(f"{what} held"), what
        assert ended[following] < step.note(f"{what} goes on") < computes[first_of_layer[present]], what


@on_each
def test_a_layer_is_reduced_beside_the_backward_of_the_next_one(
    steps: dict[tuple[str, int], Step], groups: str, rank: int
) -> None:
    step = steps[groups, rank]
    issued, ended, computes = step.issued("reduce_scatter"), step.ended("reduce_scatter"), step.started("mm")
    for reduced, present in enumerate((1, 0)):
        assert issued[reduced] < step.note(f"backward {present} held")
        assert ended[reduced] < step.note(f"backward {present} goes on") < computes[5 + 2 * reduced]


@pytest.mark.parametrize("rank", [0, 1])
def test_gathers_and_reductions_of_one_group_are_on_one_stream(steps: dict[tuple[str, int], Step], rank: int) -> None:
    step = steps["one group", rank]
    assert len(step.streams("all_gather")) == 1
    assert step.streams("all_gather") == step.streams("reduce_scatter")
    both = ("all_gather", "reduce_scatter")
    spans = sorted(span for name in both for span in zip(step.started(name), step.ended(name), strict=True))
    assert all(end < start for (_, end), (start, _) in pairwise(spans))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_group_of_their_own_gives_reductions_another_stream(steps: dict[tuple[str, int], Step], rank: int) -> None:
    """On which nothing waits for gathers."""
    step = steps["two groups", rank]
    (gathers,), (reductions,) = step.streams("all_gather"), step.streams("reduce_scatter")
    assert gathers != reductions
    recorded = {}
    for line in step.lines:
        kind, _, rest = line.partition(" ")
        stream, _, event = rest.partition(" ")
        if kind == "record":
            recorded[event] = stream
        elif kind == "wait" and stream == f"stream={reductions}":
            assert recorded[event] != f"stream={gathers}"


# --------------------------------------------------------------------------------------------------------------- faults

FAULTS = checks.names("library_faults.py")
LAST = [name for name in FAULTS if name.startswith("last")]


@pytest.fixture(scope="module")
def faults() -> checks.Outcomes:
    recovered = [name for name in FAULTS if name not in LAST]
    return launch("library_faults.py", 2, *recovered, NPU_SIM_STRICT_MEMORY="1", NPU_SIM_TIMEOUT_S="20")


@pytest.mark.parametrize("check", [name for name in FAULTS if name not in LAST])
def test_an_error_is_undone_on_all_ranks(faults: checks.Outcomes, check: str) -> None:
    faults.require(check)


@pytest.mark.parametrize("check", LAST)
def test_an_error_that_ends_communication_is_seen_on_all_ranks(check: str) -> None:
    timeout = "15" if check == "last_a_limit" else "5"
    options = {"NPU_SIM_STRICT_MEMORY": "1", "NPU_SIM_TIMEOUT_S": timeout}
    for rank in launch("library_faults.py", 2, check, **options).ranks:
        if rank.code != -signal.SIGABRT or "HCCL watchdog thread terminated" not in rank.output:  # it may be first
            checks.Outcomes([rank]).require(check)
