# SPDX-License-Identifier: Apache-2.0
"""StoredTexts: the stores that an engine's configuration names, and what of each request goes into them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from tandem_backend.config import EngineConfig
from tandem_backend.engine.suffix_store.store import SuffixStore
from tandem_backend.engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class StoredTexts:
    """`remembers` is the suffix store, None where none is configured; stores are all that are looked up."""

    stores: tuple[SuffixStore, ...]
    remembers: SuffixStore | None
    remembers_prompts: bool

    @classmethod
    def open(cls, config: EngineConfig, tokenizer: Tokenizer | None, vocab_size: int) -> "StoredTexts":
        """Raises ConfigError naming the key whose directory can't be used."""
        remembers, stores = None, list[SuffixStore]()
        if config.lookup_store is None and not config.lookup_corpora:
            return cls((), None, remembers_prompts=False)
        fingerprint = store_fingerprint(tokenizer, vocab_size)
        if config.lookup_store is not None:
            remembers = SuffixStore(
                config.lookup_store,
                fingerprint,
                vocab_size,
                max_bytes=config.lookup_store_bytes,
                writable=not config.lookup_store_read_only,
                key="lookup_store",
            )
            stores.append(remembers)
        for directory in config.lookup_corpora:
            stores.append(SuffixStore(directory, fingerprint, vocab_size, writable=False, key="lookup_corpora"))
        return cls(tuple(stores), remembers, config.lookup_store_scope == "all")

    def add(self, token_ids: Sequence[int], num_known: int, num_output: int) -> None:
        """Remember a finished request. num_known: tokens that earlier turns or requests brought already."""
        if self.remembers is not None and num_output:
            start = (
                min(num_known, len(token_ids) - num_output) if self.remembers_prompts else len(token_ids) - num_output
            )
            self.remembers.add(token_ids[start:])

    def close(self) -> None:
        for store in self.stores:
            store.close()

    def statistics(self) -> dict[str, float]:
        return {
            "suffix_store_tokens": sum(store.num_tokens for store in self.stores),
            "suffix_store_bytes": sum(store.num_bytes for store in self.stores),
        }


def store_fingerprint(tokenizer: Tokenizer | None, vocab_size: int) -> str:
    """SHA-256 over what each token id stands for; without a tokenizer only the number of ids is known."""
    if tokenizer is None:
        return f"{vocab_size} token ids"
    total = hashlib.sha256()
    for text, token_id in sorted(tokenizer.vocabulary().items(), key=lambda item: item[1]):
        total.update(f"{token_id} {text}\n".encode("utf-8", "surrogatepass"))
    return total.hexdigest()
