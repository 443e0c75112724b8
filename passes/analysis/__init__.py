"""Analysis: what passes ask about a program, and none of them changes."""
