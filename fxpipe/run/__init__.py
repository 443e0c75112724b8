"""Run: a step as it happens. The only package that has state."""
