"""What takes long is told by rank 0: how far it is, on one line of a terminal, and seldom in a file."""

from __future__ import annotations

import io
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.progress import log, progress, status_stream


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Notebook(io.StringIO):
    __module__ = "ipykernel.iostream"


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock, which the test sets; no thread looks at it."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(progress, "_show", lambda self: None)
    return now


def printed(now: list[float], *of: Any, seconds: int = 70, done: int = 0) -> list[tuple[float, str]]:
    """(when, in seconds; what was printed) of work that is looked at each half second."""
    stream = cast(io.StringIO, status_stream())
    found, shown = [(0.0, stream.getvalue())], progress(*of)
    with shown as advance:
        advance(done)
        for half in range(2 * seconds):
            now[0] = half / 2
            shown.tick()
            found.append((now[0], stream.getvalue()))
    found.append((now[0], stream.getvalue()))
    return [(when, text[len(before) :]) for (_, before), (when, text) in pairwise(found) if text != before]


def test_a_terminal_shows_one_line_from_5_seconds_on_and_ends_it(
    now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", Terminal())
    first, second, *_, end = printed(now, "capturing", 80, "layers", seconds=7, done=35)
    assert first == (5.0, "\rfxpipe: capturing 35 of 80 layers, 5 s")
    assert second == (5.5, "\rfxpipe: capturing 35 of 80 layers, 6 s")
    assert end[1] == f"\r{' ' * 38}\rfxpipe: capturing 35 of 80 layers took 6.5 s\n"


def test_a_file_gets_a_line_each_30_seconds_and_nothing_of_what_is_shorter(
    now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    text = "fxpipe: saving 1.5 of 3.0 GB"
    expected = [(30.0, f"{text}, 30 s\n"), (60.0, f"{text}, 60 s\n"), (69.5, f"{text} took 69.5 s\n")]
    assert printed(now, "saving", 3e9, "bytes", done=1_500_000_000) == expected
    now[0] = 0.0
    assert printed(now, "saving", 3e9, "bytes", seconds=29) == []


def test_a_notebook_gets_lines_from_5_seconds_on(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", Notebook())
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert [when for when, _ in printed(now, "balancing")] == [5.0, 35.0, 65.0, 69.5]


def test_of_an_unknown_total_the_share_is_left_out() -> None:
    texts = list[str]()
    for shown, done in [
        (progress("capturing Net"), 0),
        (progress("saving", None, "files"), 3),
        (progress("saving", 5000, "bytes"), 40),
        (progress("saving", 5e6, "bytes"), 40_000),
    ]:
        with shown as advance:
            advance(done)
        texts.append(str(shown))
    assert texts == ["capturing Net", "saving 3 files", "saving 40 of 5,000 bytes", "saving 0.0 of 5.0 MB"]


def test_the_innermost_work_is_shown_and_other_lines_begin_at_the_left(
    now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    outer, inner = progress("outer"), progress("inner")
    with outer, inner:
        now[0] = 6.0
        outer.tick()
        inner.tick()
        log("a line")
    lines = "a line\nfxpipe: inner took 6.0 s\nfxpipe: outer took 6.0 s\n"
    assert terminal.getvalue().split("\r")[1:] == ["fxpipe: inner, 6 s", " " * 18, lines]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_on_rank_0_a_thread_shows_it_and_any_thread_may_advance(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = threading.Event()
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(progress, "tick", lambda self: seen.set())
    monkeypatch.setattr("fxpipe.progress.PATIENCE", 0.0)
    before, shown = threading.active_count(), progress("adding", 8000, "numbers")
    with shown as advance:
        assert rank == "1" or seen.wait(60)
        assert threading.active_count() == before + (rank == "0")
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda _: [advance(1) for _ in range(1000)], range(8)))
    assert str(shown) == "adding 8,000 of 8,000 numbers"
    assert threading.active_count() == before


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_captures_searches_saves_and_loads_show_their_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, close = list[str](), progress.__exit__
    monkeypatch.setattr(progress, "__exit__", lambda self, *error: (ended.append(str(self)), close(self, *error))[1])
    options: Any = {"example_args": (torch.ones(8, 4),), "tracer": "export", "boundaries": "auto"}
    step = fxpipe.compile(Layers(), fxpipe.Topology([("pipe", 2)]), **options)
    assert {"capturing 6 of 6 layers", "capturing Layers"} <= {*ended}
    assert any(re.fullmatch(r"balancing \d+ of \d+ candidates", text) for text in ended)
    fxpipe.save(tmp_path, step, step=0)
    fxpipe.load(tmp_path, step)
    for what in ("saving", "checking", "loading"):
        shares = [re.findall(r"[\d,]+", text) for text in ended if re.match(f"{what} .* bytes", text)]
        assert all(done == total for done, total in shares)
        assert max(int(total.replace(",", "")) for _, total in shares) >= 6 * 20 * 4  # the parameters' bytes
