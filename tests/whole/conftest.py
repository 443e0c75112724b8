"""What tests of whole runs look at."""

from __future__ import annotations

from typing import Any

import pytest

from fxpipe.plan.capture.captures import Captures


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
