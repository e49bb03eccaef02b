# SPDX-License-Identifier: Apache-2.0
"""Assembly: what rounds run on, sized by the configuration: state, caches, drafters and passes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tandem_backend.config import EngineConfig
from tandem_backend.engine.cache.disk_files import DiskFiles
from tandem_backend.engine.cache.disk_tier import DiskTier
from tandem_backend.engine.cache.prefix_cache import PrefixCache
from tandem_backend.engine.cache.spill import Spill, state_fingerprint
from tandem_backend.engine.drafters.base import Drafter
from tandem_backend.engine.drafters.build import plan_drafters
from tandem_backend.engine.drafting import Drafting
from tandem_backend.engine.fingerprint import Fingerprint
from tandem_backend.engine.library_linear import allow_library
from tandem_backend.engine.memory import MemoryPlan
from tandem_backend.engine.pools import IndexPool
from tandem_backend.engine.round import RecordLogits, RoundRunner
from tandem_backend.engine.router import Router, load_verify_curve
from tandem_backend.engine.self_test import NUM_SLOTS
from tandem_backend.engine.sizes import MemorySizes
from tandem_backend.engine.suffix_store import StoredTexts
from tandem_backend.engine.tokenizer import Tokenizer
from tandem_backend.errors import ConfigError
from tandem_backend.model.decoder import Decoder
from tandem_backend.model.graphs import GraphLimits, make_passes
from tandem_backend.model.state import allocate_state


@dataclass(frozen=True, slots=True)
class Assembly:
    sizes: MemorySizes
    memory: MemoryPlan
    num_slots: int
    stored_texts: StoredTexts
    rounds: RoundRunner
    spill: Spill | None  # None where nothing goes to disk


def assemble(
    config: EngineConfig,
    model: Decoder,
    tokenizer: Tokenizer | None,
    max_context_len: int,
    extra_drafters: Mapping[str, Drafter] | None,
    record_logits: RecordLogits | None,
    fingerprint: Callable[[], Fingerprint],
) -> Assembly:
    """Load the drafters and allocate all memory. Raises ConfigError and CheckpointError.

    fingerprint: asked for, which takes long, where states go to disk.
    """
    plan = plan_drafters(config, model, tokenizer)
    num_slots = max(config.max_active + config.max_sessions, NUM_SLOTS)
    sizes = plan.memory_sizes(model)
    num_blocks = sizes.num_pool_blocks(config, num_slots, max_context_len)
    memory = MemoryPlan.of(model, sizes, config, num_blocks, num_slots)
    memory.check(model)
    stored_texts = StoredTexts.open(config, tokenizer, model.config.vocab_size)
    drafters = {**plan.build(num_blocks, num_slots, stored_texts.stores), **(extra_drafters or {})}
    state = allocate_state(model.config, num_blocks, num_slots, device=model.device)
    if config.prefill_linear == "cublas":
        allow_library(model, state, config.max_prefill_rows)
    limits = GraphLimits(config.max_graph_rows, max_context_len, config.graph_capture_s)
    passes = make_passes(model, state, limits)
    curve = load_verify_curve(config.verify_curve, passes.row_costs() if config.verify_curve is None else ())
    router = Router(curve, config.row_budget, always=config.router == "always")
    drafting = Drafting(drafters, plan.names, router, config.max_draft_tokens)
    cache = PrefixCache(
        state,
        IndexPool(num_blocks),
        drafter_kv=drafting.kv_layers(),
        block_bytes=sizes.block_bytes,
        max_bytes=config.prefix_cache_bytes,
        grid=config.anchor_grid,
    )
    rounds = RoundRunner(passes, state, drafting, cache, record_logits)
    memory, spill = replace(memory, graphs=passes.num_bytes()), _open_disk_cache(config, cache, fingerprint)
    return Assembly(sizes, memory, num_slots, stored_texts, rounds, spill)


def _open_disk_cache(config: EngineConfig, cache: PrefixCache, take: Callable[[], Fingerprint]) -> Spill | None:
    if config.disk_cache is None:
        return None
    if not cache.is_on:
        raise ConfigError("disk_cache: needs prefix_cache_bytes, out of which it is written and into which it is read")
    fingerprint = state_fingerprint(take(), cache)
    files = DiskFiles(config.disk_cache, fingerprint, max_bytes=config.disk_cache_bytes, ttl_s=config.disk_cache_ttl_s)
    return Spill(cache, DiskTier(files, fingerprint))
