"""Picture: a timeline as SVG, and as an HTML page with that SVG and tooltips. No dependency, nothing to download."""

from fxpipe.picture.drawing import svg
from fxpipe.picture.page import html

__all__ = ["html", "svg"]
