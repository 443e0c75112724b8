"""Agree: the ranks of a pipe group settle on one plan before each call."""
