"""Page: the SVG picture in an HTML file, and in a notebook's cell."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from html import escape

from fxpipe.errors import ScheduleError, printable
from fxpipe.notebook import preformatted
from fxpipe.schedules.action_table import ActionTable
from fxpipe.schedules.action_times import ActionTimes
from fxpipe.schedules.show.svg_picture import svg
from fxpipe.schedules.show.words import headline
from fxpipe.schedules.stage_times import SLOWEST, stage_table
from fxpipe.schedules.step_breakdown import tabulated

STYLE = """
:root { color-scheme: light dark }
body { margin: 0; font: 13px system-ui, sans-serif }
.fxpipe .cells rect:hover, .fxpipe .reduction:hover { stroke: #3b82f6; stroke-width: 2 }
"""


def html(timeline: ActionTimes) -> str:
    """Returns the picture as a page that loads and runs nothing; a browser shows the title of the cell pointed at."""
    slowest = re.compile(f"^.*{escape(SLOWEST)}$", re.MULTILINE)
    tables = [slowest.sub(r"<mark>\g<0></mark>", preformatted(stage_table(timeline)))] if timeline.measured else []
    tables += [preformatted(tabulated(timeline.spells))] if timeline.spells else []
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width"/>
<title>{escape(printable(headline(timeline)[0]))}</title>
<style>{STYLE}</style>
</head>
<body>
{zoomable(svg(timeline))}
{"".join(tables)}
</body>
</html>
"""


ZOOM = """
.fxpipe-zoom { margin: 0 } .fxpipe-zoom div { overflow: auto; resize: vertical }
.fxpipe-zoom .fxpipe { max-width: none; width: calc(min(100%, var(--width)) * var(--zoom, 1)) }
.fxpipe-zoom [value="2"]:checked ~ div { --zoom: 2 } .fxpipe-zoom [value="4"]:checked ~ div { --zoom: 4 }
.fxpipe-zoom [value="8"]:checked ~ div { --zoom: 8 }
"""


def zoomable(picture: str) -> str:
    """Returns a picture that fits the page, with buttons for 2, 4 and 8 times its width, which scrolls. CSS alone does
    this. Each picture has a form of its own, so that the buttons of two pictures are independent."""
    chosen = {1: ' checked="checked"'}
    buttons = (f'<input type="radio" name="zoom" value="{n}"{chosen.get(n, "")}/> {n}×' for n in (1, 2, 4, 8))
    return f'<style>{ZOOM}</style><form class="fxpipe-zoom">{" ".join(buttons)}<div>{picture}</div></form>'


# --- the output of a notebook cell ---

MOST_CELLS = 10_000
"""The most cells of a picture in a notebook, about 2 MB, which the notebook loads each time it opens."""


def pictured(schedule: ActionTable, planned: Callable[[], ActionTimes], text: str) -> str:
    """Returns the picture of the times as HTML, and ``text``, its table. A table that deadlocks has no picture."""
    table = preformatted(text)
    # A notebook keeps each output in its file, and a browser draws it again when the file opens.
    cells = sum(map(len, schedule.rows))
    if cells > MOST_CELLS:
        return table + preformatted(f"{cells:,} cells are too many for a notebook: to_html(path) draws them")
    try:
        return f"{zoomable(_apart(svg(planned())))}{table}"
    except ScheduleError as error:
        return table + preformatted(str(error))


def _apart(picture: str) -> str:
    """Makes ids unique: pictures on a page would share the stripes of the first, which may be hidden."""
    own = f"fxpipe-{uuid.uuid4().hex}-"
    return picture.replace('id="fxpipe-', f'id="{own}').replace("url(#fxpipe-", f"url(#{own}")
