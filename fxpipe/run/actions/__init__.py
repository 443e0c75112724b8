"""Actions: a rank's instructions as prepared calls."""
