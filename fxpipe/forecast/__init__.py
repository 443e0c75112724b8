"""Forecast: what a plan would take, before or beside a run: bytes, seconds, and the change that would help most."""
