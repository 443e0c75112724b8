"""Picture: a timeline as SVG, and as an HTML page with that SVG and tooltips. No dependency, nothing to download."""

from fxpipe.formats.html_page import html
from fxpipe.formats.svg_picture import svg

__all__ = ["html", "svg"]
