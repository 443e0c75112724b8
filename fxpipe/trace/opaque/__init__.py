"""Opaque regions: user code that runs as written in every step, as one call in a stage."""
