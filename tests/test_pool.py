"""The pool of worker processes that the tests use."""

from __future__ import annotations

import pytest

from tests.pool import Pool


def same(answer: str) -> str:
    return answer


def ended(workers: list[object], _: float) -> None:
    if workers:
        raise KeyboardInterrupt


def test_a_call_that_is_ended_leaves_no_answer_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool()
    try:
        assert pool.run(same, "the first", ranks=2) == ["the first"] * 2
        with monkeypatch.context() as patch:
            patch.setattr(pool, "_answers", ended)
            with pytest.raises(KeyboardInterrupt):
                pool.run(same, "the second", ranks=2)
        assert pool.run(same, "the third", ranks=2) == ["the third"] * 2
    finally:
        pool.close()
