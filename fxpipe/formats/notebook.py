"""Behind a cell of a notebook: the picture of a table, and the table."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from fxpipe.errors import ScheduleError
from fxpipe.formats.svg_picture import svg
from fxpipe.notebook import preformatted
from fxpipe.schedules.schedule import Schedule, Timeline

MOST_CELLS = 20_000
"""Of a picture that every opening of the notebook loads again: some 2 MB. What is larger is for a file of its own."""


def pictured(shown: Schedule | Timeline, timeline: Callable[[], Timeline]) -> str:
    """``shown`` as HTML: its timeline's picture, and its own table. A table that deadlocks has no picture."""
    table = preformatted(str(shown))
    schedule = shown if isinstance(shown, Schedule) else shown.schedule
    cells = sum(map(len, schedule.rows))
    if cells > MOST_CELLS:
        return table + preformatted(f"{cells:,} cells are too many for a notebook: to_html(path) draws them")
    try:
        return f'<div style="overflow-x: auto">{_apart(svg(timeline()))}</div>{table}'
    except ScheduleError as error:
        return table + preformatted(str(error))


def _apart(picture: str) -> str:
    """With ids of its own: of several on a page each would take its stripes from the first, which may be hidden."""
    own = f"fxpipe-{uuid.uuid4().hex}-"
    return picture.replace('id="fxpipe-', f'id="{own}').replace("url(#fxpipe-", f"url(#{own}")
