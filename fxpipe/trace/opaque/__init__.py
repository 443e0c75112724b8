"""Opaque regions: code of the user's that runs as it is written in every step, as one call in a stage."""
