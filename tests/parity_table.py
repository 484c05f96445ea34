"""Checks docs/parity.md: every row names tests that exist, and with ``--run`` that pass.

python -m tests.parity_table          # names only
python -m tests.parity_table --run    # runs every named test, too
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "parity.md"
BEHAVIOURS = 105

_TEST = re.compile(r"(tests/\w+\.py)::(test_\w+)")


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        key: its first cell.
        tests: ``(file, function)``.
        verdict: its last cell: same, differs, or not supported, with the reason.
    """

    key: str
    tests: tuple[tuple[str, str], ...]
    verdict: str


def rows(text: str) -> Iterator[Row]:
    """All rows of the tables that have a column ``tests``."""
    listed = False
    for line in text.splitlines():
        cells = [c.strip() for c in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            listed = False
        elif "tests" in cells:
            listed = True
        elif listed and not set(cells[0]) <= set("-: "):
            yield Row(cells[0], tuple(_TEST.findall(line)), cells[-1])


def problems(text: str) -> list[str]:
    """What is wrong with the tables."""
    found = []
    table = list(rows(text))
    numbers = [int(r.key) for r in table if r.key.isdigit()]
    missing = sorted(set(range(1, BEHAVIOURS + 1)) - set(numbers))
    double = sorted({n for n in numbers if numbers.count(n) > 1})
    if missing or double:
        found.append(f"behaviours missing: {missing}, twice: {double}")
    for row in table:
        if not row.tests and not row.verdict.startswith("not supported:"):
            found.append(f"row {row.key}: names no test and doesn't say 'not supported: why'")
        found += [f"row {row.key}: no {name} in {file}" for file, name in row.tests if name not in functions(file)]
    return found


@cache
def functions(file: str) -> frozenset[str]:
    """Names of the test functions of a file; none if it doesn't exist."""
    path = ROOT / file
    if not path.exists():
        return frozenset()
    tree = ast.parse(path.read_text())
    return frozenset(n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name.startswith("test_"))


class _Outcomes:
    """Collects how each test function ended, over all its parameters."""

    def __init__(self) -> None:
        self.bad: set[str] = set()
        self.passed: set[str] = set()

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid.partition("[")[0]
        if report.failed or report.skipped or hasattr(report, "wasxfail"):
            self.bad.add(name)
        elif report.when == "call":
            self.passed.add(name)


def run(text: str) -> list[str]:
    """Run all named tests. Those that didn't pass, in all their parameters, without skips and expected failures."""
    import pytest

    wanted = sorted({f"{file}::{name}" for row in rows(text) for file, name in row.tests})
    outcomes = _Outcomes()
    pytest.main(["-q", "-p", "no:cacheprovider", *wanted], plugins=[outcomes])
    return [f"{name} didn't pass" for name in wanted if name in outcomes.bad or name not in outcomes.passed]


def main() -> int:
    text = TABLE.read_text()
    found = problems(text)
    if not found and "--run" in sys.argv[1:]:
        found = run(text)
    for line in found:
        print(line)
    print("docs/parity.md: " + (f"{len(found)} problems" if found else "every row holds"))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
