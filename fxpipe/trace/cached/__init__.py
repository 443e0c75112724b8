"""Captures kept in a folder between calls (``cache=``): found again by all that they depend on, as data only."""

from fxpipe.trace.cached.folder import check_folder
from fxpipe.trace.cached.tracer import export_or_cached

__all__ = ["check_folder", "export_or_cached"]
