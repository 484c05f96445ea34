"""docs/parity.md names tests that exist, and its checker sees what is wrong."""

from __future__ import annotations

from tests import parity_table


def test_every_row_of_the_parity_table_names_tests_that_exist():
    assert parity_table.problems(parity_table.TABLE.read_text()) == []


def test_the_checker_sees_missing_rows_and_tests():
    here = "tests/test_parity_table.py::test_the_checker_sees_missing_rows_and_tests"
    text = (
        "| number | behaviour | tests | result |\n|---|---|---|---|\n"
        f"| 1 | a | {here} | same |\n| 2 | b | tests/test_parity_table.py::test_nothing | same |\n| 3 | c | | same |\n"
    )
    found = parity_table.problems(text)
    assert found[0] == f"behaviours missing: {list(range(4, 106))}, twice: []"
    assert found[1] == "row 2: no test_nothing in tests/test_parity_table.py"
    assert found[2] == "row 3: names no test and doesn't say 'not supported: why'"
    assert len(found) == 3
