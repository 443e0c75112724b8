"""What tests of whole runs look at."""

from __future__ import annotations

from typing import Any

import pytest

from fxpipe.plan.captures import Captures


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The captures that are made."""
    made: list[Any] = []
    capture = Captures._captured

    def noting(self: Captures, *args: Any) -> Any:
        made.append(capture(self, *args))
        return made[-1]

    monkeypatch.setattr(Captures, "_captured", noting)
    return made
