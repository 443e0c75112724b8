"""What takes long is told on stderr, once, by rank 0."""

from __future__ import annotations

import contextlib
import io
import threading

import pytest

from fxpipe import progress


def test_what_is_quick_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.progress("adding numbers"):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("rank", "lines"), [("0", 2), ("1", 0)])
def test_what_takes_long_is_told_while_it_runs_and_at_its_end(
    rank: str, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    told, begun = io.StringIO(), threading.Event()
    monkeypatch.setattr(threading, "Timer", lambda *args: _Timer(*args, begun=begun))
    monkeypatch.setattr("sys.stderr", told)
    with progress.progress("capturing a model"), contextlib.redirect_stderr(io.StringIO()):
        assert begun.wait(60)
    found = told.getvalue().splitlines()
    assert len(found) == lines
    if lines:
        assert found[0] == "fxpipe: capturing a model …"
        assert found[1].startswith("fxpipe: capturing a model took ")


_THREAD_TIMER = threading.Timer


class _Timer(_THREAD_TIMER):  # type: ignore[misc, valid-type]
    """Tells when it has run."""

    def __init__(self, seconds: float, function: object, args: list[object], begun: threading.Event) -> None:
        super().__init__(seconds, lambda: (function(*args), begun.set()))  # type: ignore[operator]
