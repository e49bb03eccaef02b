# SPDX-License-Identifier: Apache-2.0
"""The suffix store against a plain list of documents, across restarts, damage, caps and processes."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from engine_driver import VOCAB_SIZE, EngineDriver, engine_config
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_backend.engine.suffix_store import SuffixStore, build_corpus
from tandem_backend.engine.suffix_store.segment import END, GRAM, MAX_MATCH, segment_bytes
from tandem_backend.engine.suffix_store.store import MIN_BYTES, MIN_CAPACITY
from tandem_backend.errors import ConfigError
from tandem_backend.types import Prompt, Request, SamplingParams

VOCAB = 50


def open_store(directory: Path, tokenizer: str = "t", max_bytes: int = 0, *, writable: bool = True) -> SuffixStore:
    return SuffixStore(directory, tokenizer, VOCAB, max_bytes=max_bytes, writable=writable, key="lookup_store")


def write(directory: Path, documents: Sequence[Sequence[int]], max_bytes: int = 0) -> None:
    store = open_store(directory, max_bytes=max_bytes)
    for document in documents:
        store.add(document)
    store.close()


def common(a: Sequence[int], b: Sequence[int]) -> int:
    n = 0
    while n < min(len(a), len(b), MAX_MATCH) and a[-1 - n] == b[-1 - n]:
        n += 1
    return n


def expected(documents: Sequence[Sequence[int]], text: Sequence[int], depth: int) -> set[tuple[int, tuple[int, ...]]]:
    """Every place in the documents, found the slow way."""
    found = set()
    for document in documents:
        for place in range(GRAM, len(document)):
            length = common(document[:place], text)
            if length >= GRAM:
                found.add((length, tuple(document[place : place + depth])))
    return found


tokens = st.lists(st.integers(0, 3), min_size=GRAM + 1, max_size=40)


@settings(max_examples=40)
@given(documents=st.lists(tokens, min_size=1, max_size=6), text=tokens, depth=st.integers(1, 6))
def test_matches_are_places_that_follow_the_same_tokens(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], text: list[int], depth: int
) -> None:
    directory = tmp_path_factory.mktemp("store")
    write(directory, documents)
    store = open_store(directory, writable=False)
    everything = expected(documents, text, depth)
    matches = store.matches(text, depth, 1000)
    assert set(matches) <= everything
    assert bool(matches) == bool(everything)
    assert [length for length, _ in matches] == sorted((length for length, _ in matches), reverse=True)
    few = store.matches(text, depth, 2)
    assert few == matches[:2]


def test_a_store_outlives_its_process(tmp_path: Path) -> None:
    write(tmp_path / "store", [[1, 2, 3, 4, 5, 6]])
    write(tmp_path / "store", [[1, 2, 3, 4, 7, 8]])
    store = open_store(tmp_path / "store", writable=False)
    assert store.matches([9, 1, 2, 3, 4], 2, 8) == [(4, (7, 8)), (4, (5, 6))]
    assert store.num_tokens == 14  # with the two ends


def test_files_are_the_owners_alone(tmp_path: Path) -> None:
    write(tmp_path / "store", [[1, 2, 3, 4, 5, 6]])
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "store").iterdir()} == {0o600}


def test_the_cap_forgets_the_oldest_documents_whole(tmp_path: Path) -> None:
    marked = [[i % VOCAB, i // VOCAB, 1, 2, 3, *[4] * 200, i % VOCAB, i // VOCAB] for i in range(400)]
    write(tmp_path, marked, MIN_BYTES)
    assert sum(path.stat().st_size for path in tmp_path.glob("0*")) <= MIN_BYTES
    store = open_store(tmp_path, writable=False)
    kept = [bool(store.matches(document[:5], 1, 1000)) for document in marked]
    assert [len(text) for _, text in store.matches(marked[-1][:5], 300, 1)] == [len(marked[-1]) - 5]
    first = kept.index(True)
    assert 0 < first < len(marked) - 10
    assert all(kept[first:])


def test_a_document_longer_than_a_segment_is_kept_in_parts(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    document = rng.integers(0, VOCAB, 3 * MIN_CAPACITY).tolist()
    write(tmp_path, [document], 8 * segment_bytes(MIN_CAPACITY))
    store = open_store(tmp_path, writable=False)
    assert store.matches(document[:MAX_MATCH], 1, 1) == [(MAX_MATCH, (document[MAX_MATCH],))]
    assert store.matches(document[-MAX_MATCH - 1 : -1], 1, 1) == [(MAX_MATCH, (document[-1],))]


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    write(tmp_path, [[1, 2, 3, 4, 5]])
    with pytest.raises(ConfigError, match=r"lookup_store: .* another tokenizer"):
        open_store(tmp_path, tokenizer="other")


def test_a_folder_that_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no suffix store: store\.json"):
        open_store(tmp_path, writable=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="lookup_store"):
        open_store(tmp_path / "file" / "store")


def flip(path: Path) -> None:
    data = np.fromfile(path, dtype=np.uint32)
    data[1:] = np.random.default_rng(1).integers(0, END, len(data) - 1, dtype=np.uint32)
    data.tofile(path)


def truncate(path: Path) -> None:
    os.truncate(path, 10)


def wrong_count(path: Path) -> None:
    data = np.fromfile(path, dtype=np.uint32)
    data[0] = END
    data.tofile(path)


@pytest.mark.parametrize("damage", [flip, truncate, wrong_count, Path.unlink])
@pytest.mark.parametrize("suffix", [".tokens", ".links", ".heads"])
def test_damage_gives_no_token_outside_the_vocabulary(
    tmp_path: Path, damage: Callable[[Path], None], suffix: str
) -> None:
    document = list(range(20)) * 3
    write(tmp_path, [document])
    damage(next(tmp_path.glob(f"*{suffix}")))
    store = open_store(tmp_path)
    for end in range(GRAM, len(document)):
        for _, text in store.matches(document[:end], 8, 100):
            assert all(0 <= token_id < VOCAB for token_id in text)
    store.add(document)
    store.close()
    # Unless its links lie, what was added now is found.
    again = open_store(tmp_path, writable=False)
    assert again.matches(document[:12], 1, 1) in ([(MAX_MATCH, (12,))], [])


def test_a_second_writer_only_reads(tmp_path: Path) -> None:
    first = open_store(tmp_path)
    second = open_store(tmp_path)
    second.add([1, 2, 3, 4, 5])
    second.close()
    first.add([1, 2, 3, 4, 6])
    first.close()
    assert open_store(tmp_path, writable=False).matches([1, 2, 3, 4], 1, 8) == [(4, (6,))]


def test_a_killed_writer_leaves_a_readable_store(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from tandem_backend.engine.suffix_store import SuffixStore\n"
        f"store = SuffixStore(Path(sys.argv[1]), 't', {VOCAB}, writable=True, key='k')\n"
        "print('on', flush=True)\n"
        "while True: store._append(__import__('numpy').arange(40, dtype='uint32'))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"on\n"
    while not any(path.stat().st_blocks > 16 for path in tmp_path.glob("*.tokens")):
        assert process.poll() is None
    process.kill()
    process.wait()
    store = open_store(tmp_path)
    matches = store.matches(list(range(10)), 3, 8)
    assert matches
    assert set(matches) == {(MAX_MATCH, (10, 11, 12))}
    store.close()


def test_build_corpus_refuses_a_used_directory(tmp_path: Path) -> None:
    assert build_corpus(tmp_path, "t", VOCAB, [[1, 2, 3, 4, 5]]) == 6
    with pytest.raises(ConfigError, match="holds a corpus already"):
        build_corpus(tmp_path, "t", VOCAB, [[1, 2, 3, 4, 5]])


@pytest.mark.parametrize("scope", ["outputs", "all"])
def test_an_engine_drafts_from_what_it_answered_before(hybrid: Path, tmp_path: Path, scope: str) -> None:
    """The second time a text comes from the store, with the same tokens and in fewer rounds."""
    params = SamplingParams(max_tokens=40, ignore_eos=True, drafter="lookup")
    prompt = Prompt(token_ids=tuple(i * 7 % VOCAB_SIZE for i in range(30)))
    config = engine_config(
        hybrid, drafters=("lookup",), router="always", lookup_store=tmp_path, lookup_store_scope=scope
    )

    def run() -> tuple[tuple[int, ...], int]:
        driver = EngineDriver(config)
        result = driver.run(Request(request_id="a", prompt=prompt, params=params))
        rounds = driver.engine.counters().num_rounds
        driver.engine.close()
        return tuple(result.token_ids), rounds

    first, num_first = run()
    second, num_second = run()
    assert second == first
    assert num_second < num_first / 2
    store = SuffixStore(tmp_path, f"{VOCAB_SIZE} token ids", VOCAB_SIZE, writable=False, key="lookup_store")
    assert bool(store.matches(prompt.token_ids[:20], 1, 1)) == (scope == "all")
