"""Tests of the MindSpore side: collected only where MindSpore is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

HERE = importlib.util.find_spec("mindspore") is not None
collect_ignore_glob = [] if HERE else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Limit each test's time: the first one on some number of ranks starts their processes too."""
    for item in items:
        if "/ms/" in item.path.as_posix() and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def mccl() -> Iterator[object]:
    """The session's MindSpore workers: ``mccl.run(fn, *args, world=2)``; nothing is started before the first job."""
    from tests.ms.pool import MsPool

    pool = MsPool()
    yield pool
    pool.close()
