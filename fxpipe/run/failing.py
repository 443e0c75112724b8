"""Failing: what fails on one rank fails on all, and after that nothing runs any more."""

from __future__ import annotations

import contextlib

from fxpipe.distributed.transport import Transport, failing_together
from fxpipe.errors import RunError
from fxpipe.run.wire.exchange import Exchange


class Failing:
    """Whether this rank has failed, and how, and what it then does to others."""

    def __init__(self, transport: Transport, exchange: Exchange) -> None:
        self._transport = transport
        self._reason: str | None = None
        self.drops = [exchange.drop]
        """What lets go of what is under way."""

    def together(self, *spare: type[BaseException]) -> contextlib.AbstractContextManager[None]:
        """What fails inside fails on every rank. ``spare``: errors after which one can go on; see the transport's."""
        return failing_together(self._transport, self._give_up, spare, self._drop)

    def check_open(self) -> None:
        """RunError where an earlier step has failed."""
        if self._reason is not None:
            raise RunError(f"an earlier step failed ({self._reason}); compile again")

    def close(self) -> None:
        """Nothing runs from now on."""
        self._reason = self._reason or "it was closed"

    def _drop(self) -> None:
        for drop in self.drops:
            drop()

    def _give_up(self, reason: str) -> None:
        self._drop()
        if self._transport.pipe_rank is not None:
            self._reason = reason.splitlines()[0] if reason else "unknown"
        self._transport.abort(reason)
