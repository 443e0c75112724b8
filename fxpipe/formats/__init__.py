"""Formats: tables and timelines as files: CSV, SVG, an HTML page with that SVG and tooltips, a Chrome trace."""

from fxpipe.formats.html_page import html
from fxpipe.formats.svg_picture import svg

__all__ = ["html", "svg"]
