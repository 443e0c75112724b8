"""Plan: everything that is known before a step."""
