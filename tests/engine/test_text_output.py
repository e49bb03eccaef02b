# SPDX-License-Identifier: Apache-2.0
"""Text as it streams: whole characters only, stop strings wherever they fall, and nothing that is taken back."""

import unicodedata
from collections.abc import Sequence
from pathlib import Path

import pytest
from fakes.tiny_text_model import NUM_TOKENS
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tandem_backend.engine.text_output import TextOutput
from tandem_backend.engine.tokenizer import Tokenizer

WITHOUT_DEADLINE = settings(deadline=None, max_examples=60)
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
TEXTS = st.text(st.sampled_from("ab é\n🙂👩\u200d🚀漢字\u0301"), max_size=12)


@pytest.fixture(scope="module")
def words(bundled: Path) -> Tokenizer:
    """The bundled model's byte-pair tokenizer."""
    return Tokenizer(bundled)


@pytest.fixture(scope="module")
def byte_tokens(text_model: Path) -> Tokenizer:
    """One token a byte."""
    return Tokenizer(text_model)


def streamed(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.push(token_id) for token_id in token_ids), stream.flush()]


def cut_at_stop(text: str, stop: Sequence[str], *, include_stop: bool) -> str:
    """Where a reader of one character at a time would stop."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            return text[:end] if include_stop else text[: end - max(map(len, complete))]
    return text


def write(
    tokenizer: Tokenizer, token_ids: Sequence[int], stop: Sequence[str] = (), *, include_stop: bool = False
) -> tuple[list[str], bool]:
    """All pieces that a request of these tokens gives out, and whether a stop string ended it."""
    output = TextOutput(tokenizer, tuple(stop), include_stop=include_stop)
    pieces = []
    for token_id in token_ids:
        piece, stopped = output.push(token_id, may_stop=True)
        pieces.append(piece)
        if stopped:
            break
    else:
        pieces.append(output.flush())
        stopped = False
    assert output.text == "".join(pieces)
    return pieces, stopped


@given(data=st.data())
@WITHOUT_DEADLINE
def test_any_tokens_stream_to_what_they_decode_to(data: st.DataObject, words: Tokenizer) -> None:
    size = len(words.vocabulary())
    token_ids = data.draw(st.lists(st.integers(0, size - 1), max_size=40))
    assert "".join(streamed(words, token_ids)) == words.decode(token_ids, skip_special_tokens=True)


@given(token_ids=st.lists(st.integers(0, NUM_TOKENS - 1), max_size=30))
@WITHOUT_DEADLINE
def test_any_bytes_stream_to_what_they_decode_to(token_ids: list[int], byte_tokens: Tokenizer) -> None:
    assert "".join(streamed(byte_tokens, token_ids)) == byte_tokens.decode(token_ids, skip_special_tokens=True)


@given(text=TEXTS)
@example(text="👩\u200d🚀")
@WITHOUT_DEADLINE
def test_characters_come_whole_and_at_once(text: str, byte_tokens: Tokenizer) -> None:
    pieces = streamed(byte_tokens, byte_tokens.encode(text, add_special_tokens=False))
    assert REPLACEMENT not in "".join(pieces)
    assert [piece for piece in pieces if piece] == list(text)
    assert pieces[-1] == ""


@given(text=TEXTS)
@WITHOUT_DEADLINE
def test_no_piece_ends_inside_a_character(text: str, words: Tokenizer) -> None:
    pieces = streamed(words, words.encode(text, add_special_tokens=False))
    assert REPLACEMENT not in "".join(pieces)
    assert "".join(pieces) == unicodedata.normalize("NFC", text)  # as this tokenizer does


def test_bytes_that_never_became_a_character_are_replaced_at_the_end(byte_tokens: Tokenizer) -> None:
    token_ids = byte_tokens.encode("a🙂", add_special_tokens=False)[:-1]
    assert streamed(byte_tokens, token_ids) == ["a", "", "", "", REPLACEMENT]


def test_special_tokens_are_no_text(byte_tokens: Tokenizer) -> None:
    token_ids = byte_tokens.encode("a<end>b", add_special_tokens=False)
    assert streamed(byte_tokens, token_ids) == ["a", "", "b", ""]


@given(
    text=st.text(st.sampled_from("abc"), max_size=14),
    stop=st.lists(st.text(st.sampled_from("abc"), min_size=1, max_size=4), max_size=3),
    include_stop=st.booleans(),
)
@example(text="aab", stop=["ab", "aab"], include_stop=False)
@example(text="abab", stop=["babx", "ab"], include_stop=True)
@example(text="abcc", stop=["bc", "abcd"], include_stop=False)
@settings(deadline=None, max_examples=200)
def test_stop_strings_end_the_text_where_the_first_is_complete(
    text: str, stop: list[str], include_stop: bool, byte_tokens: Tokenizer, words: Tokenizer
) -> None:
    expected = cut_at_stop(text, stop, include_stop=include_stop)
    for tokenizer in (byte_tokens, words):
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        pieces, stopped = write(tokenizer, token_ids, stop, include_stop=include_stop)
        assert "".join(pieces) == expected
        assert stopped == any(s in text for s in stop)


@given(
    text=st.text(st.sampled_from("ab🙂"), max_size=10),
    stop=st.lists(st.text(st.sampled_from("ab🙂"), min_size=1, max_size=3), min_size=1, max_size=2),
)
@WITHOUT_DEADLINE
def test_what_a_stop_could_take_back_is_held_and_nothing_else(
    text: str, stop: list[str], byte_tokens: Tokenizer
) -> None:
    given_out = ""
    output = TextOutput(byte_tokens, tuple(stop), include_stop=False)
    whole = b""
    for token_id in byte_tokens.encode(text, add_special_tokens=False):
        piece, stopped = output.push(token_id, may_stop=True)
        given_out += piece
        whole += byte_of(byte_tokens, token_id)
        seen = whole.decode(errors="ignore")
        if stopped:
            assert given_out == cut_at_stop(seen, stop, include_stop=False)
            return
        held = seen[len(given_out) :]
        assert seen.startswith(given_out)
        assert held == max((end for end in ends(seen) if any(s.startswith(end) for s in stop)), key=len, default="")
    assert given_out + output.flush() == text


def byte_of(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The byte, of those in "ab🙂", that a token of the byte tokenizer stands for."""
    known = "ab🙂"
    return dict(zip(ids_of(tokenizer, known), (bytes([value]) for value in known.encode()), strict=True))[token_id]


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def ends(text: str) -> list[str]:
    return [text[n:] for n in range(len(text))]


def test_a_stop_string_over_several_tokens_is_never_shown(words: Tokenizer) -> None:
    token_ids = words.encode("def read(path):\n    return 1\n\nclass Reader:", add_special_tokens=False)
    pieces, stopped = write(words, token_ids, ["\n\nclass"])
    assert stopped
    assert "".join(pieces) == "def read(path):\n    return 1"
    assert not any("class" in piece for piece in pieces)


def test_the_start_of_a_stop_string_comes_out_when_the_text_ends(byte_tokens: Tokenizer) -> None:
    token_ids = byte_tokens.encode("one EN", add_special_tokens=False)
    pieces, stopped = write(byte_tokens, token_ids, ["END"])
    assert not stopped
    assert pieces[-1] == "EN"
    assert "".join(pieces) == "one EN"


def test_no_stop_string_counts_before_it_may(byte_tokens: Tokenizer) -> None:
    output = TextOutput(byte_tokens, ("b",), include_stop=False)
    first = [output.push(token_id, may_stop=False) for token_id in ids_of(byte_tokens, "abb")]
    assert first == [("a", False), ("b", False), ("b", False)]
    assert output.push(ids_of(byte_tokens, "b")[0], may_stop=True) == ("", True)
