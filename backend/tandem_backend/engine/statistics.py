# SPDX-License-Identifier: Apache-2.0
"""What an engine says of itself: what there is now, and what was done since the load."""

from copy import deepcopy
from dataclasses import replace

from tandem_backend.engine.cache.disk_tier import DiskTier
from tandem_backend.engine.cache.responses import ResponseCache
from tandem_backend.engine.scheduler import Scheduler
from tandem_backend.engine.self_test import SelfTestResult
from tandem_backend.engine.sizes import MemorySizes
from tandem_backend.engine.times import RoundTimes
from tandem_backend.types import CacheCounters, EngineCounters, SessionEnd


def statistics(
    scheduler: Scheduler, sizes: MemorySizes, self_test: SelfTestResult | None, responses: ResponseCache
) -> dict[str, float]:
    """Values of this moment by name; serving reports every key as a metric."""
    s = scheduler
    kept = [session.sequence for session in s.sessions.values() if session.sequence is not None]
    return {
        "num_active": len(s.running),
        "num_queued": len(s.waiting),
        "max_active": s.config.max_active,
        "max_queued": s.config.max_queued,
        "num_sessions": len(s.sessions),
        "num_blocks": s.blocks.size,
        "num_free_blocks": s.blocks.num_free + s.cache.num_evictable,
        "num_block_tokens": sizes.block,
        "kv_cache_bytes": s.blocks.size * sizes.block_bytes,
        "kv_cache_used_bytes": (s.blocks.size - s.blocks.num_free - s.cache.num_evictable) * sizes.block_bytes,
        "num_cached_blocks": s.cache.index.num_nodes,
        "num_slots": s.slots.size,
        "num_free_slots": s.slots.num_free,
        "num_anchors": s.cache.num_anchors,
        "prefix_cache_bytes": s.cache.num_bytes,
        "response_cache_bytes": responses.num_bytes,
        "session_cache_bytes": sum(sizes.sequence_bytes(sequence.num_computed) for sequence in kept),
        "self_test_passed": int(self_test is not None),  # 0: skipped; an engine that fails it does not load
        "self_test_seconds": self_test.seconds if self_test is not None else 0.0,
        "self_test_rows": self_test.num_rows if self_test is not None else 0,
    }


def counters(
    done: EngineCounters,
    times: RoundTimes,
    scheduler: Scheduler,
    sessions: CacheCounters,
    responses: ResponseCache,
    tier: DiskTier | None,
) -> EngineCounters:
    """A copy of `done` with the rounds' parts and the caches' counters."""
    num_evicted = done.ended_sessions[SessionEnd.MEMORY] + done.ended_sessions[SessionEnd.IDLE]
    caches = {
        "prefix": replace(scheduler.cache.counters),
        "session": replace(sessions, num_evictions=num_evicted),
        "response": replace(responses.counters),
    }
    if tier is not None:
        caches["disk"] = replace(tier.counters, num_evictions=tier.files.num_evictions)
    return replace(deepcopy(done), part_s=times.by_part_s(), caches=caches)
