"""What tests of whole runs look at."""

from __future__ import annotations

from typing import Any

import pytest

from fxpipe.plan.capture.captures import Captures
from tests.harness import Engines, engine_of


@pytest.fixture
def engines(request: pytest.FixtureRequest) -> Engines:
    """The engine of a name; worker processes are started only for the one that needs them."""
    return lambda name: engine_of(name, lambda: request.getfixturevalue("pool"))


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The captures that are made for steps."""
    made: list[Any] = []
    capture = Captures._captured

    def noting(self: Captures, pattern: Any, *args: Any) -> Any:
        found = capture(self, pattern, *args)
        made.extend([found] * pattern.training)
        return found

    monkeypatch.setattr(Captures, "_captured", noting)
    return made
