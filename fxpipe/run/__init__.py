"""Run: a step as it happens. The only room that has state."""
