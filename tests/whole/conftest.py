"""What tests of whole runs look at."""

from __future__ import annotations

from typing import Any

import pytest

from fxpipe.capture.capturing import Capturing
from tests.harness import Engines, engine_of


@pytest.fixture
def engines(request: pytest.FixtureRequest) -> Engines:
    """The engine of a name; worker processes are started only for the one that needs them."""
    return lambda name: engine_of(name, lambda: request.getfixturevalue("pool"))


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The captures that are made for steps."""
    made: list[Any] = []
    capture = Capturing._capture

    def noting(self: Capturing, *args: Any) -> Any:
        captures, captured = capture(self, *args)
        made.extend([captured] * self.pattern.training)
        return captures, captured

    monkeypatch.setattr(Capturing, "_capture", noting)
    return made
