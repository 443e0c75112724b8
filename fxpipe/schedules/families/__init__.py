"""Families: how the actions of a step are ordered, one a file, each a pure function from a problem to rows."""
