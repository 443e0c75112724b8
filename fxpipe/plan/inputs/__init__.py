"""Inputs: what a call was given, described, and cut into micro-batches."""
