"""Numerics: records the numbers of a run, and finds where the numbers of two runs part."""
