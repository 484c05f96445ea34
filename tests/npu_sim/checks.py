"""Checks that run on simulated ranks: many in one launch, since a launch takes seconds.

A script defines functions ``check_NAME()`` and ends with ``checks.main(globals())``. Each rank runs all of them, in
order, and prints what came of each; `outcomes` starts the ranks and collects that.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .run import Ended, run_ranks

FOLDER = Path(__file__).parent / "on_ranks"
_MARK = "npu-sim-check "


def main(namespace: Mapping[str, Any]) -> None:
    """Run the checks of a script, or those that its arguments name, in the order in which they are defined; one that
    fails doesn't stop the others."""
    for function, check in list(namespace.items()):
        name = function.removeprefix("check_")
        if name != function and (name in sys.argv[1:] or not sys.argv[1:]):
            print(_line(name, _failure(check)), flush=True)


def passed(check: str) -> str:
    """The line to print for a check that ends the process."""
    return _line(check, "")


def names(script: str) -> list[str]:
    """The checks of a script in ``on_ranks``, without running it."""
    return re.findall(r"^def check_(\w+)", Path(FOLDER, script).read_text(), flags=re.MULTILINE)


class Outcomes:
    """What became of a script's checks.

    Attributes:
        ranks: how the ranks ended, with all that they wrote.
    """

    def __init__(self, ranks: list[Ended]) -> None:
        self.ranks = ranks
        self._found = [dict(_marked(rank.output)) for rank in ranks]

    def require(self, check: str) -> None:
        """Assert that the check passed on every rank."""
        for rank, found in zip(self.ranks, self._found, strict=True):
            assert check in found, f"rank {rank.rank} (exit code {rank.code}) didn't get so far:\n{rank.output[-3000:]}"
            assert found[check] == "", f"rank {rank.rank}: {found[check]}"


def outcomes(
    script: str, nproc: int, *only: str, active: bool = True, limit_s: float = 120.0, **options: str
) -> Outcomes:
    """Run a script of ``on_ranks`` on ``nproc`` ranks.

    Args:
        only: the checks to run; all if none is named.
        active, limit_s: see `run_ranks`.
        options: variables of the ranks' environment.
    """
    command = [FOLDER / script, *only]
    return Outcomes(run_ranks(command, nproc, options=options, limit_s=limit_s, capture=True, active=active))


def _line(check: str, failure: str) -> str:
    return _MARK + json.dumps([check, failure])


def _failure(check: Callable[[], None]) -> str:
    try:
        check()
    except Exception:
        return traceback.format_exc()
    return ""


def _marked(output: str) -> list[tuple[str, str]]:
    """The lines that `main` has printed, among whatever else the rank wrote."""
    lines = (line.partition(_MARK)[2] for line in output.splitlines())
    return [tuple(json.loads(line)) for line in lines if line]
