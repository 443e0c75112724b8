"""What all tests share: one thread per process, and the workers of the tests that need several."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.pool import Pool

SLOW = """
"""
"""What takes seconds: files and tests, from ``tests/`` on."""

torch.set_num_threads(1)  # thread counts change bits
torch.manual_seed(0)  # for what test modules make when they are imported


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Every test draws the same numbers in every run, whichever others run before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes for ``pool.run(fn, *args, ranks=4)``; none is left at the end."""
    workers = Pool()
    try:
        yield workers
    finally:
        workers.close()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "processes: uses the pool of worker processes")
    config.addinivalue_line("markers", "slow: takes seconds, and is listed in tests/conftest.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """``pytest -m "not processes and not slow"`` is the short way through."""
    slow = tuple(f"tests/{name}" for name in SLOW.split())
    for item in items:
        if item.nodeid.startswith(slow):
            item.add_marker("slow")
        call = getattr(item, "callspec", None)
        if "pool" in getattr(item, "fixturenames", ()) or (call and "distributed" in call.params.values()):
            item.add_marker("processes")
