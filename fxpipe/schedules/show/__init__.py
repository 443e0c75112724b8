"""Formats: tables and timelines as files: CSV, SVG, an HTML page with that SVG and tooltips, a Chrome trace."""
