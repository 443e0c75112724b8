"""Families: the orders of a step's actions, one family per file, each a pure function from a problem to rows."""
