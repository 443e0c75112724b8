"""Plan: all facts about a step that are known before it runs."""
