"""Preview: what a plan holds and takes, without running it."""
