"""Incremental detokenisation: the same text however it is split, and stop strings that never leak."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.text.stream import TextStream


class Table:
    """A vocabulary that is a list of byte strings."""

    def __init__(self, *tokens: bytes) -> None:
        self.tokens = tokens

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]


BYTES = Table(*(bytes([i]) for i in range(256)))
# Halves of characters, bytes that are never UTF-8, a control token, and letters that stop strings overlap in.
PIECES = Table(
    b"a", b"b", b"ab", b"ba", "é".encode()[:1], "é".encode()[1:], "😀".encode()[:3], b"\x80", b"\xff", b""
)


def replay(
    tokenizer: Table, ids: list[int], sizes: list[int], stop: tuple[str, ...]
) -> tuple[list[str], TextStream]:
    stream, deltas, at = TextStream(tokenizer, stop), [], 0
    for size in [*sizes, len(ids)]:
        deltas.append(stream.push(ids[at : at + size]))
        at += size
    deltas.append(stream.finish())
    assert "".join(deltas) == stream.text
    return deltas, stream


def ended_by(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """The definition, by brute force: the first stop string to be complete, the longer of two at once."""
    found = [(text.find(s) + len(s), text.find(s), s) for s in stop if s in text]
    if not found:
        return text, None
    _, start, which = min(found)
    return text[:start], which


ids_of_pieces = st.lists(st.integers(0, len(PIECES.tokens) - 1), max_size=30)
sizes_of_calls = st.lists(st.integers(0, 4), max_size=30)
stops = st.lists(st.text(alphabet="abé�", min_size=1, max_size=5), max_size=4).map(tuple)


@given(ids=ids_of_pieces, sizes=sizes_of_calls, stop=stops)
def test_any_split_gives_the_text_of_a_single_push_and_the_stop_of_the_definition(
    ids: list[int], sizes: list[int], stop: tuple[str, ...]
) -> None:
    whole = b"".join(map(PIECES.token_bytes, ids)).decode("utf-8", "replace")
    expected, which = ended_by(whole, stop)
    _, stream = replay(PIECES, ids, sizes, stop)
    assert (stream.text, stream.stopped) == (expected, which)
    _, at_once = replay(PIECES, ids, [], stop)
    assert (stream.text, stream.tokens_used) == (at_once.text, at_once.tokens_used)


@given(text=st.text(max_size=30), sizes=sizes_of_calls)
def test_text_survives_every_split_of_its_bytes(text: str, sizes: list[int]) -> None:
    deltas, stream = replay(BYTES, list(text.encode()), sizes, ())
    assert stream.text == text
    assert deltas[-1] == ""


@given(ids=ids_of_pieces, stop=stops)
def test_nothing_is_held_that_no_stop_could_begin_with(ids: list[int], stop: tuple[str, ...]) -> None:
    """After each id, out are all complete characters but those that a stop string begins with."""
    stream = TextStream(PIECES, stop)
    for count, token_id in enumerate(ids, start=1):
        stream.push([token_id])
        if stream.stopped is not None:
            assert stream.tokens_used <= count
            return
        assert stream.tokens_used == count
        raw = b"".join(map(PIECES.token_bytes, ids[:count]))
        complete = {raw[: len(raw) - cut].decode("utf-8", "replace") for cut in range(4)}
        held = {text[len(stream.text) :] for text in complete if text.startswith(stream.text)}
        assert any(not rest or any(s.startswith(rest) and s != rest for s in stop) for rest in held)


def test_a_character_comes_out_with_its_last_byte() -> None:
    stream = TextStream(BYTES)
    assert [stream.push([byte]) for byte in "é😀!".encode()] == ["", "é", "", "", "", "😀", "!"]


def test_an_incomplete_character_ends_as_a_replacement() -> None:
    stream = TextStream(BYTES)
    assert stream.push("a😀".encode()[:3]) == "a"
    assert [stream.finish(), stream.finish()] == ["�", ""]
    assert stream.text == "a�"


def test_text_that_only_begins_like_the_stop_comes_out() -> None:
    stream = TextStream(BYTES, ["DEFGHIJ"])
    assert [stream.push([byte]) for byte in b" DEFX"] == [" ", "", "", "", "DEFX"]
    assert stream.push(b"DEFGHI") == ""
    assert stream.finish() == "DEFGHI"
    assert stream.stopped is None


def test_a_stop_that_spans_tokens_is_never_seen() -> None:
    stream = TextStream(Table(b"alpha ", b"be", b"ta", b" gam", b"ma delta"), ["beta gamma"])
    assert [stream.push([i]) for i in range(5)] == ["alpha ", "", "", "", ""]
    assert (stream.stopped, stream.tokens_used, stream.finish()) == ("beta gamma", 5, "")


def test_ids_after_the_stop_are_neither_used_nor_looked_at() -> None:
    stream = TextStream(Table(b"a", b"STOP", b"b"), ["STOP"])
    assert stream.push([0, 1, 2, 99]) == "a"
    assert stream.tokens_used == 2
    assert stream.push([99]) == ""


def test_the_stop_that_is_complete_first_wins_then_the_longer() -> None:
    first = TextStream(BYTES, ["abcd", "c"])
    assert (first.push(b"abcd"), first.stopped) == ("ab", "c")
    longer = TextStream(BYTES, ["c", "bc"])
    assert (longer.push(b"abc"), longer.stopped) == ("a", "bc")


def test_a_failed_beginning_may_hold_the_true_one() -> None:
    stream = TextStream(BYTES, ["aab"])
    assert stream.push(b"xaaab!") == "xa"
    assert stream.stopped == "aab"


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        TextStream(BYTES, ["a", ""])
