"""How values show themselves in one line, and behind a cell of a notebook."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from html import unescape
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

import fxpipe
from fxpipe.notebook import listed, preformatted
from fxpipe.progress import log
from fxpipe.schedules import build
from fxpipe.schedules.action import Action
from fxpipe.schedules.schedule import Schedule
from fxpipe.schedules.show.html_page import MOST_CELLS
from tests.graphs import FAMILIES, WORKED, chain
from tests.models import Layers


class TwoTower(Layers):
    names, width = "image text", 4

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (fxpipe.stage_boundary(self.image(x)) - fxpipe.stage_boundary(self.text(y))).square().mean()


@pytest.fixture(scope="module")
def compiled() -> fxpipe.ForwardBackward:
    forward_backward = fxpipe.compile(TwoTower(), fxpipe.Topology([("pipe", 3)]), microbatches=2)
    forward_backward(torch.randn(4, 4), torch.randn(4, 4))
    return forward_backward


def test_what_prints_as_a_table_shows_the_same_table_behind_a_cell(compiled: fxpipe.ForwardBackward) -> None:
    planned = compiled.schedule.simulate()
    for value in (compiled.stages, compiled.topology, compiled.traffic(), fxpipe.compare(planned, planned)):
        shown = value._repr_html_()
        assert str(value) in unescape(shown)
        assert re.match(r'<pre style="[^"]*font-family: monospace', shown)


def test_forward_backward_shows_stages_picture_and_table(compiled: fxpipe.ForwardBackward) -> None:
    shown = compiled._repr_html_()
    places = [unescape(shown).index(part) for part in (str(compiled.stages), "<svg", str(compiled.schedule))]
    assert places == sorted(places)


def test_every_repr_is_one_short_line(compiled: fxpipe.ForwardBackward) -> None:
    topology = fxpipe.Topology([("pipe", 3)])
    plan = fxpipe.preview(TwoTower(), topology, microbatches=2)
    for value in (compiled, compiled.stages, compiled.stages[0], compiled.schedule, compiled.traffic(), topology, plan):
        assert re.fullmatch(r"[^\n]{1,200}", repr(value))
    assert repr(compiled.stages) == f"<StageGraph of 3 stages: {', '.join(compiled.stages.names)}>"
    assert repr(compiled.stages[0]) == "<Stage 0 `image`: (x) -> (image)>"


def test_a_table_keeps_its_own_characters() -> None:
    assert "a &lt;b&gt; &amp; c" in preformatted("a <b> & c")


def test_neither_many_names_nor_long_ones_make_a_line_long() -> None:
    assert listed(list("abcdefg")) == "a, b, c, d, e, …, g"
    assert listed(["a", "b" * 90]) == f"a, {'b' * 29}…"
    assert listed([]) == ""


def test_two_pictures_of_a_page_have_no_id_in_common() -> None:
    table = fxpipe.schedules.build("zb_h1", [(0, 1)], 4)
    first, second = (set(re.findall(r'id="([^"]+)"', table._repr_html_())) for _ in range(2))
    assert first
    assert first.isdisjoint(second)
    shown = table._repr_html_()
    assert set(re.findall(r"url\(#([^)]+)\)", shown)) == set(re.findall(r'id="([^"]+)"', shown))


# --- schedules and timelines ---


def parts(shown: str) -> tuple[list[str], set[str]]:
    """The texts of the tables, and the actions that a picture has a cell for."""
    root = ElementTree.fromstring(f"<body>{shown}</body>")  # well-formed, and so nothing of it can leave its place
    tables = [part.text or "" for part in root.iter("pre")]
    return tables, {title.text.split()[0] for title in root.iter("{http://www.w3.org/2000/svg}title") if title.text}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_schedule_and_its_timeline_show_every_action_and_the_printed_table(name: str) -> None:
    schedule = build(name, WORKED, 4, names=["<image>", "b", "c", "d & e", "loss"])
    for shown in (schedule, schedule.planned()):
        tables, cells = parts(shown._repr_html_())
        assert tables == [str(shown)]
        assert cells == {str(action) for row in schedule.rows for action in row}


def test_a_table_that_comes_to_a_halt_shows_its_grid_and_the_reason() -> None:
    rows = (tuple(map(Action.parse, ["0B0", "0F0"])), tuple(map(Action.parse, ["1F0", "1B0"])))
    schedule = Schedule(rows, ((0, 1),), (0, 1), (True, True), 1)
    (table, reason), cells = parts(schedule._repr_html_())
    assert table == str(schedule)
    assert "0B0" in reason
    assert not cells


def test_a_table_of_many_cells_says_where_its_picture_is_had() -> None:
    schedule = build("gpipe", chain(2), MOST_CELLS // 4 + 1)
    (table, hint), cells = parts(schedule._repr_html_())
    assert table == str(schedule)
    assert "to_html" in hint
    assert not cells


@pytest.mark.parametrize("name", FAMILIES)
def test_repr_is_one_short_line(name: str) -> None:
    schedule = build(name, chain(4), 64)
    assert repr(schedule) == f"<Schedule {schedule.name}: 4 stages on 4 ranks, 64 micro-batches>"
    assert re.fullmatch(rf"<Timeline of {re.escape(schedule.name)}: [^\n]{{1,200}}>", repr(schedule.planned()))


# --- what a cell prints and starts ---


def test_a_status_line_is_no_error_of_a_cell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stderr = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    monkeypatch.setattr("sys.stderr", stderr)
    log("fxpipe: saved")
    assert capsys.readouterr().out == "fxpipe: saved\n"


CELLS = """
import fxpipe, os, sys
if "without" in sys.argv:
    sys.modules["cloudpickle"] = None
def helper(x):
    return x + int(os.environ["RANK"])
def cell(x):
    return helper(x)
print(fxpipe.launch(cell, 2, 5))
"""


def test_a_function_of_a_cell_is_launched_or_the_way_is_told() -> None:
    def run(*options: str) -> tuple[str, str]:
        command = [sys.executable, "-c", CELLS, *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
        return done.stdout, done.stderr

    assert re.search(r"cell is defined in a notebook's cell .* %%writefile my_module\.py", run("without")[1])
    pytest.importorskip("cloudpickle")
    assert run()[0] == "[5, 6]\n"
