"""Settings and fixtures of all tests: one thread for each process, hypothesis profiles, the pool of gloo workers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.gloo_pool import GlooPool

# Read by torch when it is first imported, so it has to come before any test module.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

# Test helpers have one name each, `tests.<module>`, whatever the working directory and pytest's import mode are: a
# module that is imported under two names has two copies of its classes.
ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("dev", deadline=None, print_blob=True, max_examples=20)
settings.register_profile("thorough", deadline=None, print_blob=True, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_finish() -> None:
    """Limit torch to one thread where it was imported before this file."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="session")
def gloo() -> Iterator[GlooPool]:
    """The session's gloo workers: ``gloo.run(fn, *args, world=2)``; nothing is started before the first job."""
    from tests.gloo_pool import GlooPool

    pool = GlooPool()
    yield pool
    pool.close()
