# SPDX-License-Identifier: Apache-2.0
"""How long the lookup drafter's suffix store takes for an answer, at any size."""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from tandem_backend.benchmarks.environment import num_usable_cores, provenance
from tandem_backend.benchmarks.table import table
from tandem_backend.engine.suffix_store import SuffixStore, build_corpus

VOCAB_SIZE, DOCUMENT_LEN = 32_000, 2_000
NUM_PHRASES, PHRASE_LEN = 200_000, 8  # texts are made of phrases that come again and again, the common ones often
DEPTH, COUNT = 16, 8  # what the drafter asks for
NUM_LOOKUPS = 5_000


def measure_suffix_store(num_tokens: int, directory: Path | None) -> dict[str, Any]:
    """Write num_tokens in a directory (a temporary one by default), open it anew and look up ends of its texts."""
    rng = np.random.default_rng(0)
    phrases = rng.integers(0, VOCAB_SIZE, (NUM_PHRASES, PHRASE_LEN))

    def document() -> list[int]:
        # Zipf's law: the n-th commonest phrase is 1 / n as common as the first.
        ranks = (NUM_PHRASES ** rng.random(DOCUMENT_LEN // PHRASE_LEN)).astype(int) - 1
        tokens: list[int] = phrases[ranks].ravel().tolist()
        return tokens

    with tempfile.TemporaryDirectory() as scratch:
        place = directory or Path(scratch) / "store"
        begun = time.perf_counter()
        build_corpus(place, "bench", VOCAB_SIZE, (document() for _ in range(max(num_tokens // DOCUMENT_LEN, 1))))
        build_s = time.perf_counter() - begun
        store = SuffixStore(place, "bench", VOCAB_SIZE, writable=False, key="store")
        queries = [document()[: int(rng.integers(16, 200))] for _ in range(NUM_LOOKUPS)]
        for query in queries:  # from the disk into memory
            store.matches(query, DEPTH, COUNT)
        times, num_found = [], 0
        for query in queries:
            begun = time.perf_counter()
            found = store.matches(query, DEPTH, COUNT)
            times.append(1e3 * (time.perf_counter() - begun))
            num_found += bool(found)
        times.sort()
        return {
            "benchmark": "suffix-store",
            **provenance(num_usable_cores()),
            "num_tokens": store.num_tokens,
            "num_bytes": store.num_bytes,
            "build_s": build_s,
            "found_share": num_found / NUM_LOOKUPS,
            "median_ms": statistics.median(times),
            "p99_ms": times[int(0.99 * NUM_LOOKUPS)],
        }


def render_suffix_store(result: dict[str, Any]) -> str:
    keys = ("num_tokens", "num_bytes", "build_s", "found_share", "median_ms", "p99_ms")
    return table(["tokens", "bytes", "build s", "found", "median ms", "p99 ms"], [[result[key] for key in keys]])
