"""``NotKept``: why a capture cannot be kept."""

from __future__ import annotations


class NotKept(Exception):
    """A capture depends on more than can be told, or holds what a file has no word for; the message says what."""
