"""Run: executes training steps on this rank. The only package that has state."""
