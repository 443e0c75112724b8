"""Page: the SVG in an HTML file that describes the action under the pointer, and shows what it waited for."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from html import escape

from fxpipe.errors import ScheduleError, printable
from fxpipe.formats.svg_picture import svg
from fxpipe.formats.words import IN_WORDS, headline, unit_of, waited
from fxpipe.graph.ranks import named
from fxpipe.notebook import preformatted
from fxpipe.schedules.schedule import Schedule, Timeline
from fxpipe.schedules.step_breakdown import tabulated

STYLE = """
:root { color-scheme: light dark }
body { margin: 0; font: 13px system-ui, sans-serif; background: #fff; color: #14171c }
form { padding: 12px 16px 0 }
kbd { font: inherit; font-size: 11px; padding: 0 4px; border: 1px solid #8888; border-radius: 3px }
.hint { margin-left: 20px; opacity: .7 }
.scroll { overflow-x: auto }
.scroll:focus-visible { outline: 2px solid #3b82f6; outline-offset: -2px }
.fxpipe { display: block }
.fxpipe [data-action] { cursor: default }
.plain .critical:not(rect) { display: none }
.link { fill: none; stroke: #14171c; stroke-width: 2.5; pointer-events: none }
.halo { fill: none; stroke: #fff; stroke-width: 6; pointer-events: none }
.link.from { stroke-dasharray: 5 3 }
#tip { position: fixed; left: 0; top: 0; max-width: 340px; padding: 8px 11px; border-radius: 6px; line-height: 1.45;
  background: #14171c; color: #f2f4f6; white-space: pre-line; pointer-events: none; box-shadow: 0 2px 10px #0006 }
#tip b { font-size: 14px; margin-right: 3px }
@media (prefers-color-scheme: dark) {
  body { background: #15171b; color: #e8eaed }
  .link { stroke: #fff } .halo { stroke: #000 }
  #tip { background: #f2f4f6; color: #14171c }
}
"""

# Per action the data hold: when it runs, how long, what it waited for in words, and the action it waited for.
SCRIPT = r"""
"use strict";
const { words, names, actions } = JSON.parse(document.getElementById("data").textContent);
const svg = document.querySelector("svg.fxpipe"), tip = document.getElementById("tip");
const pane = document.querySelector(".scroll"), labels = svg.querySelector(".pinned");
const cells = new Map(), rows = [];
let current = null;

for (const cell of svg.querySelectorAll("[data-action]")) {
  const [x, y, width, height] = ["x", "y", "width", "height"].map(name => Number(cell.getAttribute(name)));
  const box = { name: cell.dataset.action, x, y, width, height };
  cells.set(box.name, box);
  const last = rows[rows.length - 1];
  if (last && last[0].y === y) last.push(box); else rows.push([box]);
}
for (const row of rows) {
  row.sort((a, b) => a.x - b.x || a.width - b.width);
  row.forEach((box, place) => Object.assign(box, { row, place }));
}

const layer = svg.insertBefore(document.createElementNS(svg.namespaceURI, "g"), labels);
function draw(kind, d) {
  for (const style of ["halo", "link " + kind]) {
    const path = layer.appendChild(document.createElementNS(svg.namespaceURI, "path"));
    path.setAttribute("class", style);
    path.setAttribute("d", d);
  }
}
const around = box => `M${box.x} ${box.y}h${Math.max(box.width, 1)}v${box.height}h${-Math.max(box.width, 1)}z`;

function show(name, x, y) {
  const box = cells.get(name), [interval, duration, waited, cause] = actions[name];
  const [, stage, op, microbatch] = name.match(/^(\d+)(\D)([\d-]+)$/);
  if (current !== box) {
    current = box;
    layer.replaceChildren();
    const from = cells.get(cause);
    if (from) {
      const end = from.x + from.width, down = box.y > from.y;
      const start = from.y + (down ? from.height : 0), stop = box.y + (down ? 0 : box.height);
      if (from.y !== box.y) draw("line", `M${end} ${start}L${box.x} ${stop}`);
      draw("from", around(from));
    }
    draw("here", around(box));
    const title = document.createElement("b");
    title.textContent = name;
    const batches = microbatch.includes("-") ? "es" : "";
    const lines = [`${words[op]} of micro-batch${batches} ${microbatch}`, `stage ${names[stage]}`];
    tip.replaceChildren(title, [" " + lines[0], lines[1], `${interval}, takes ${duration}`, waited].join("\n"));
    tip.hidden = false;
  }
  const left = x + 16 + tip.offsetWidth > innerWidth ? x - 12 - tip.offsetWidth : x + 16;
  const top = y + 18 + tip.offsetHeight > innerHeight ? y - 12 - tip.offsetHeight : y + 18;
  tip.style.transform = `translate(${Math.max(left, 4)}px, ${Math.max(top, 4)}px)`;
}
function hide() {
  current = null;
  tip.hidden = true;
  layer.replaceChildren();
}
function showByKey(box) {
  const origin = svg.getBoundingClientRect(), room = pane.getBoundingClientRect();
  const labelled = labels.firstElementChild.getBBox().width, top = box.y + origin.top;
  if (box.x + box.width + origin.left > room.right) pane.scrollLeft = box.x + box.width - room.width + 40;
  if (box.x + origin.left < room.left + labelled) pane.scrollLeft = box.x - labelled - 20;
  if (top < 0 || top + box.height > innerHeight) scrollBy(0, top - innerHeight / 2);
  const now = svg.getBoundingClientRect();
  show(box.name, now.left + box.x + box.width / 2, now.top + box.y + box.height / 2);
}
const keys = {
  ArrowRight: box => box.row[box.place + 1],
  ArrowLeft: box => box.row[box.place - 1],
  ArrowDown: box => step(box, 1),
  ArrowUp: box => step(box, -1),
  Enter: box => cells.get(actions[box.name][3]),
};
function step(box, by) {
  const row = rows[rows.indexOf(box.row) + by], middle = box => box.x + box.width / 2;
  const off = other => Math.abs(middle(other) - middle(box));
  return row && row.reduce((a, b) => off(b) < off(a) ? b : a);
}

// In a bubble it is the action that ends it which knows what the rank waits for.
function afterBubble(event) {
  const row = rows.find(row => row[0].y === Number(event.target.getAttribute("y")));
  const x = event.clientX - svg.getBoundingClientRect().left;
  return row && event.target.matches(".track") && row.find(box => box.x >= x)?.name;
}
function point(event) {
  const name = event.target.dataset.action || afterBubble(event);
  if (name) show(name, event.clientX, event.clientY); else hide();
}
// A mouse, a pen and a finger all send these; of a finger that is lifted, what it tapped stays to be read.
svg.addEventListener("pointermove", point);
svg.addEventListener("pointerdown", point);
svg.addEventListener("pointerleave", event => { if (event.pointerType === "mouse") hide(); });
pane.addEventListener("keydown", event => {
  if (event.key === "Escape") return hide();
  if (!(event.key in keys) || !rows.length) return;
  event.preventDefault();
  const next = current ? keys[event.key](current) : rows[0][0];
  if (next) showByKey(next);
});
pane.addEventListener("blur", hide);
pane.addEventListener("scroll", () => labels.setAttribute("transform", `translate(${pane.scrollLeft} 0)`));
document.getElementById("critical").addEventListener("change", event => {
  svg.classList.toggle("plain", !event.target.checked);
});
"""


def html(timeline: Timeline) -> str:
    """The picture as a page of its own, which loads nothing: hover, tap or the arrow keys describe an action."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{escape(printable(headline(timeline)[0]))}</title>
<style>{STYLE}</style>
</head>
<body>
<form><label><input type="checkbox" id="critical" checked autocomplete="off"> critical path</label>
<span class="hint">Point at a cell or a bubble, or go about with the arrow keys; <kbd>Enter</kbd> follows what was \
waited for.</span></form>
<div class="scroll" tabindex="0">
{svg(timeline)}</div>
{preformatted(tabulated(timeline.spells)) if timeline.spells else ""}
<div id="tip" role="status" hidden></div>
<script type="application/json" id="data">{_data(timeline)}</script>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _data(timeline: Timeline) -> str:
    """What the script shows, as JSON that no name can end: "<" is escaped."""
    unit, stages = unit_of(timeline), range(len(timeline.schedule.placement))
    actions = {}
    for action, (start, end) in timeline.spans.items():
        cause = timeline.cause(action)
        times = unit.interval(start, end), unit.time(end - start)
        actions[str(action)] = *times, waited(timeline, action, unit), str(cause.action) if cause else ""
    data = {
        "words": {op.value: words for op, words in IN_WORDS.items()},
        "names": [f"{timeline.schedule.label(s)}, {named(timeline.schedule.placement[s])}" for s in stages],
        "actions": actions,
    }
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


# --- behind a cell of a notebook ---

MOST_CELLS = 20_000
"""Of a picture that every opening of the notebook loads again: some 2 MB. What is larger is for a file of its own."""


def pictured(shown: Schedule | Timeline, timeline: Callable[[], Timeline]) -> str:
    """``shown`` as HTML: its timeline's picture, and its own table. A table that deadlocks has no picture."""
    table = preformatted(str(shown))
    schedule = shown if isinstance(shown, Schedule) else shown.schedule
    # A notebook keeps each output in its file, and a browser draws it again when the file opens.
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
