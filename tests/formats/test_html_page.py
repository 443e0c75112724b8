"""The page: it says of each action what a reader would ask, and loads nothing."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest

from fxpipe.formats.html_page import html
from fxpipe.formats.svg_picture import svg
from fxpipe.schedules import build
from fxpipe.schedules.action import Action
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.schedule import Span, Timeline
from tests.graphs import FAMILIES, JOINED, chain, joined, random_timelines


class Page(HTMLParser):
    """What a browser would find: tags, and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts[-1] += data


def data_of(page: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(Page(page).scripts[0])
    return data


def actions_of(page: str) -> dict[str, list[str]]:
    actions: dict[str, list[str]] = data_of(page)["actions"]
    return actions


def test_the_page_says_when_each_action_ran_and_what_it_waited_for() -> None:
    """The times are those worked out by hand in test_simulate."""
    page = html(build("1f1b", chain(2), 2, names=["body", "head"]).simulate(forward=1, backward=2, comm=0.5))
    assert actions_of(page) == {
        "0F0": ["0 to 1 F", "1 F", "waited for nothing", ""],
        "0F1": ["1 to 2 F", "1 F", "its rank was busy with 0F0", "0F0"],
        "0B0": ["5 to 7 F", "2 F", "waited 3 F for 1B0 from rank 1", "1B0"],
        "0B1": ["8 to 10 F", "2 F", "waited 1 F for 1B1 from rank 1", "1B1"],
        "1F0": ["1.5 to 2.5 F", "1 F", "waited 1.5 F for 0F0 from rank 0", "0F0"],
        "1B0": ["2.5 to 4.5 F", "2 F", "its rank was busy with 1F0", "1F0"],
        "1F1": ["4.5 to 5.5 F", "1 F", "its rank was busy with 1B0", "1B0"],
        "1B1": ["5.5 to 7.5 F", "2 F", "its rank was busy with 1F1", "1F1"],
    }
    assert data_of(page)["names"] == ["0: body, rank 0", "1: head, rank 1"]
    assert data_of(page)["words"] == {
        "F": "forward", "R": "forward again", "B": "backward", "I": "input gradients", "W": "weight gradients",
    }  # fmt: skip


def measured_by_hand() -> Timeline:
    """One micro-batch over two ranks, in seconds: overhead before 0F0 and 1B0, and 0B0 waits for a message."""
    times = {"0F0": (0.002, 0.012, 0.0), "1F0": (0.014, 0.024, 0.0), "1B0": (0.025, 0.045, 0.024)}
    times["0B0"] = (0.0475, 0.0675, 0.012)
    schedule = build("1f1b", chain(2), 1)
    spans = {Action.parse(name): Span(start, end) for name, (start, end, _) in times.items()}
    since = {Action.parse(name): ready for name, (_, _, ready) in times.items()}
    return Timeline(schedule, spans, since, Costs.of(2, 0.01, 0.02, comm=0.001), measured=True)


def test_a_measured_page_counts_in_milliseconds() -> None:
    assert actions_of(html(measured_by_hand())) == {
        "0F0": ["2 to 12 ms", "10 ms", "waited 2 ms, for no other action", ""],
        "1F0": ["14 to 24 ms", "10 ms", "waited 14 ms for 0F0 from rank 0", "0F0"],
        "1B0": ["25 to 45 ms", "20 ms", "its rank was busy with 1F0, then waited 1 ms", "1F0"],
        "0B0": ["47.5 to 67.5 ms", "20 ms", "waited 35.5 ms for 1B0 from rank 1", "1B0"],
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_the_page_holds_the_same_picture_and_data_for_each_cell(name: str) -> None:
    for timeline in random_timelines(name)[:8]:
        page = html(timeline)
        assert svg(timeline) in page
        assert set(actions_of(page)) == {str(action) for action in timeline.spans}
        assert {cause for *_, cause in actions_of(page).values()} <= {"", *map(str, timeline.spans)}


def test_the_page_loads_nothing_and_no_name_gets_out_of_it() -> None:
    names = ["</script><script>alert(1)</script>", '"><img src=x onerror=alert(1)>']
    text = html(build("1f1b", chain(2), 2, names=names).simulate())
    page = Page(text)
    assert len(page.scripts) == 2
    assert "img" not in [tag for tag, _ in page.tags]
    assert not [attributes for _, attributes in page.tags if {"src", "href", "onerror"} & set(attributes)]
    assert set(re.findall(r"https?://[^\"'\s]+", text)) == {"http://www.w3.org/2000/svg"}
    assert data_of(text)["names"] == [f"0: {names[0]}, rank 0", f"1: {names[1]}, rank 1"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs chromium, as in Debian's package of that name")
    with pytest.importorskip("playwright.sync_api").sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"], timeout=120_000)
        yield browser
        browser.close()


def test_in_a_browser_the_pointer_and_the_keys_show_what_an_action_waited_for(browser: Any) -> None:
    page = browser.new_page()
    errors: list[Exception] = []
    page.on("pageerror", lambda error: errors.append(error))
    page.set_content(html(build("1f1b", chain(2), 2, names=["body", "head"]).simulate(forward=1, backward=2, comm=0.5)))
    page.hover('[data-action="1B0"]')
    assert page.inner_text("#tip").splitlines() == [
        "1B0 backward of micro-batch 0",
        "stage 1: head, rank 1",
        "2.5 to 4.5 F, takes 2 F",
        "its rank was busy with 1F0",
    ]
    assert page.locator(".link.from").count() == 1
    page.focus(".scroll")
    shown = []
    for key in ("ArrowRight", "ArrowUp", "Enter", "Enter"):
        page.keyboard.press(key)
        shown.append(page.inner_text("#tip b"))
    assert shown == ["1F1", "0B0", "1B0", "1F0"]
    page.keyboard.press("Escape")
    assert not page.is_visible("#tip")
    assert page.locator("path.critical").first.is_visible()
    page.uncheck("#critical")
    assert not page.locator("path.critical").first.is_visible()
    assert not errors


def test_a_group_is_told_by_its_first_and_last_micro_batch() -> None:
    told = actions_of(html(joined(JOINED).simulate()))
    assert told["4F0-3"] == ["5 to 6 F", "1 F", "waited 5 F for 1F3 from rank 1", "1F3"]
    assert told["1B0"] == ["8 to 10 F", "2 F", "waited 3 F for 4B0-3 from rank 4", "4B0-3"]
