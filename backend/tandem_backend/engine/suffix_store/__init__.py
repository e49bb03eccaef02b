# SPDX-License-Identifier: Apache-2.0
"""Persistent texts for the lookup drafter: a log of token ids in mapped files, with an index of what followed what."""

from tandem_backend.engine.suffix_store.store import SuffixStore, build_corpus
from tandem_backend.engine.suffix_store.texts import StoredTexts, store_fingerprint

__all__ = ["StoredTexts", "SuffixStore", "build_corpus", "store_fingerprint"]
