"""Renderings as golden files: timelines as the printed table, the SVG, the page and the trace.

``python -m tests.schedules.show.test_golden`` writes the files anew: read what changed before you commit it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fxpipe.schedules import build
from fxpipe.schedules.action import Action
from fxpipe.schedules.action_times import ActionBytes, Reduction, Span
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.schedule import Timeline
from fxpipe.schedules.show.chrome_trace import chrome_trace
from fxpipe.schedules.show.html_page import html
from fxpipe.schedules.show.svg_picture import svg
from fxpipe.schedules.step_breakdown import BEFORE, COMPUTE, WAITING, Spell
from tests.graphs import JOINED, RECOMPUTED, WORKED, chain, joined, whole_table

GOLDEN = Path(__file__).with_name("golden")
NAMES = ("image 0", "image 1", "text 0", "text 1", "loss")
ODD = ('<&">', "]]>'</script><script>alert(1)</script>", "M" * 60, "\x1b[31m\0\ufffe\ud800", "a \\ long name " * 9)


def measured() -> Timeline:
    """One micro-batch on two ranks, in seconds: overhead before 0F0 and 1B0, a message before 0B0, and reductions.

    Of rank 0's reductions two overlap, so that they need two lanes; the second one ends after the last action.
    """
    times = {"0F0": (0.002, 0.012, 0.0), "1F0": (0.014, 0.024, 0.0), "1B0": (0.025, 0.045, 0.024)}
    times["0B0"] = (0.0475, 0.0675, 0.012)
    spans = {Action.parse(name): Span(start, end) for name, (start, end, _) in times.items()}
    since = {Action.parse(name): ready for name, (_, _, ready) in times.items()}
    reductions = (
        Reduction(0, 'bucket 0 <&">, 1.0 MB', 0.05, 0.06),
        Reduction(0, "bucket 1, 25.0 MB", 0.055, 0.08),
        Reduction(0, "bucket 2, 25.0 MB", 0.06, 0.0605),
        Reduction(1, "bucket 0, 1.0 MB", 0.045, 0.05),
    )
    spells = (
        Spell((0,), BEFORE, "preparing", -0.001, 0.002),
        Spell((0,), COMPUTE, "0F0", 0.002, 0.012),
        Spell((0,), WAITING, "1B0 from rank 1", 0.012, 0.0475),
        Spell((0,), COMPUTE, "0B0", 0.0475, 0.0675),
    )
    schedule, costs = build("1f1b", chain(2), 1), Costs.of(2, 0.01, 0.02, comm=0.001)
    sizes = {"0F0": (0, 3 << 20), "0B0": (3 << 20, 0), "1F0": (1 << 20, 2 << 20), "1B0": (3 << 19, 1 << 20)}
    memory = tuple(tuple(ActionBytes(a, *sizes[str(a)]) for a in row if str(a) in sizes) for row in schedule.rows)
    timeline = Timeline(schedule, spans, since, costs, measured=True, reductions=reductions, spells=spells)
    return replace(timeline, memory=memory, plan=Costs.of(2, 0.01, 0.02, activation_bytes=3 << 20))


def timelines() -> dict[str, Timeline]:
    """A timeline by the name of its files. The times of ``hops`` are worked out by hand in test_simulate."""
    hops = build("1f1b", chain(2), 2, names=["body", "head"]).simulate(forward=1, backward=2, comm=0.5)
    without = replace(measured(), spans={a: s for a, s in measured().spans.items() if str(a) != "1B0"})
    odd = build("1f1b", chain(5), 1, names=ODD).simulate()
    return {
        "hops": hops,
        "measured": measured(),
        "worked": build("1f1b", WORKED, 8, names=NAMES).simulate(),
        "several_stages": build("zb_h1", WORKED, 3, placement=[0, 1, 0, 1, 2], names=NAMES).simulate(forward=2),
        "groups": joined(JOINED).simulate(),
        "recomputed": joined(RECOMPUTED).simulate(),
        "odd_names": replace(odd, schedule=replace(odd.schedule, name="\x07")),
        "1B0_did_not_run": replace(without, memory=tuple(row[:1] for row in without.memory)),
        "nothing_ran": replace(hops, spans={}),
    }


def events(timeline: Timeline) -> str:
    """The trace, a line for each event."""
    trace = json.loads(chrome_trace(timeline))
    listed = ",\n".join(map(json.dumps, trace.pop("traceEvents")))
    return f'{{"traceEvents": [\n{listed}\n],\n{json.dumps(trace)[1:]}\n'


FORMS: dict[str, Callable[[Timeline], str]] = {
    "txt": lambda timeline: f"{whole_table(timeline)}\n",
    "svg": svg,
    "html": html,
    "json": events,
}
FILES = """
    hops.txt hops.svg hops.json
    measured.txt measured.svg measured.html measured.json
    worked.txt worked.svg
    several_stages.txt several_stages.svg several_stages.json
    groups.txt groups.svg groups.json
    recomputed.txt recomputed.svg
    odd_names.txt odd_names.html odd_names.json
    1B0_did_not_run.svg 1B0_did_not_run.json
    nothing_ran.html nothing_ran.json
""".split()


def render_file(file: str) -> str:
    """Returns the text that a golden file should have."""
    name, form = file.split(".")
    return FORMS[form](timelines()[name])


@pytest.mark.parametrize("file", FILES)
def test_a_rendering_is_its_golden_file(file: str) -> None:
    rendering = render_file(file)
    assert rendering == (GOLDEN / file).read_text(encoding="utf-8")
    if file.endswith(("svg", "html")):
        tags = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(rendering).iter()}
        assert not tags & {"script", "img", "link"}


@pytest.mark.parametrize("form", ["svg", "html", "trace"])
def test_a_timeline_and_a_schedule_write_their_renderings(form: str, tmp_path: Path) -> None:
    schedule, costs = build("1f1b", WORKED, 4, names=["é", *NAMES[1:]]), Costs.of(5, forward=2, backward=3, comm=1)
    render = {"svg": svg, "html": html, "trace": chrome_trace}[form]
    for number, writer in enumerate((schedule, schedule.simulate())):
        getattr(writer, f"to_{form}")(path := tmp_path / str(number))
        assert path.read_text(encoding="utf-8") == render(schedule.simulate())
    getattr(schedule, f"to_{form}")(str(tmp_path / "at costs"), costs)
    assert (tmp_path / "at costs").read_text(encoding="utf-8") == render(schedule.simulate(costs))


if __name__ == "__main__":
    for file in FILES:
        (GOLDEN / file).write_text(render_file(file), encoding="utf-8")
