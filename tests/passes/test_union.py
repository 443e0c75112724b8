"""Union: groups that are joined keep their order."""

from __future__ import annotations

from fxpipe.passes.union import Union


def test_union_joins_groups_and_keeps_their_order() -> None:
    union = Union("abcdef")
    union.join("a", "c")
    union.join("d", "f")
    union.join("c", "f")
    assert union.groups() == [list("acdf"), ["b"], ["e"]]
    assert union.same("a", "d")
    assert not union.same("a", "b")
    assert "a" in union
    assert "z" not in union


def test_the_first_of_two_joined_stands_for_both() -> None:
    union = Union("abc")
    union.join("a", "b")
    union.join("c", "b")
    assert {union.find(item) for item in "abc"} == {"c"}


def test_a_long_chain_of_joins_is_no_recursion() -> None:
    union = Union(range(100_000))
    for item in range(99_999):
        union.join(item + 1, item)
    assert union.find(0) == 99_999
