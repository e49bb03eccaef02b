# SPDX-License-Identifier: Apache-2.0
"""Builds the drafters that a configuration names, and refuses by name those that the checkpoint can't feed."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem_backend.config import EngineConfig
from tandem_backend.engine.drafters.base import Drafter
from tandem_backend.engine.drafters.draft_model import DraftModelDrafter
from tandem_backend.engine.drafters.lookup import LookupDrafter
from tandem_backend.engine.drafters.mtp import MtpDrafter
from tandem_backend.engine.sizes import MemorySizes, memory_sizes
from tandem_backend.engine.suffix_store import SuffixStore
from tandem_backend.engine.tokenizer import Tokenizer, has_tokenizer
from tandem_backend.errors import CheckpointError, ConfigError
from tandem_backend.model.decoder import Decoder
from tandem_backend.model.graphs import GraphLimits
from tandem_backend.model.mtp import MtpHead
from tandem_backend.model.mtp_passes import make_mtp_passes
from tandem_backend.model.state import KV_BLOCK, allocate_kv_layer, allocate_state

AUTO = "auto"
MAX_CAPTURED_ROWS = 32  # of the mtp drafter, which rarely runs more at once


@dataclass(frozen=True, slots=True)
class DrafterPlan:
    """Drafters whose weights are loaded, but not their state: the size of the block pool depends on them."""

    config: EngineConfig
    names: tuple[str, ...]
    mtp_head: MtpHead | None = field(default=None)
    draft_model: Decoder | None = field(default=None)

    def memory_sizes(self, target: Decoder) -> MemorySizes:
        draft = self.draft_model.config if self.draft_model is not None else None
        return memory_sizes(target.config, with_mtp=self.mtp_head is not None, draft_model=draft, device=target.device)

    def build(self, num_blocks: int, num_slots: int, stores: Sequence[SuffixStore] = ()) -> dict[str, Drafter]:
        """The drafters by name, cheap ones first; lookup draws on `stores` too."""
        drafters: dict[str, Drafter] = {}
        if "lookup" in self.names:
            drafters["lookup"] = LookupDrafter(stores)
        if self.mtp_head is not None:
            target = self.mtp_head.decoder
            kv = allocate_kv_layer(target.config, num_blocks, device=target.device)
            width, top_k = self.config.mtp_width, self.config.mtp_top_k
            context = self.config.max_context_len or target.config.max_position
            rows = min(self.config.max_graph_rows, MAX_CAPTURED_ROWS) if self.config.draft_graphs else 0
            passes = make_mtp_passes(self.mtp_head, kv, GraphLimits(rows, context, self.config.graph_capture_s))
            drafters["mtp"] = MtpDrafter(passes, kv, KV_BLOCK, width=width, top_k=top_k)
        if self.draft_model is not None:
            draft = self.draft_model
            state = allocate_state(draft.config, num_blocks, num_slots, device=draft.device)
            drafters["draft_model"] = DraftModelDrafter(draft, state)
        return drafters


def plan_drafters(config: EngineConfig, target: Decoder, tokenizer: Tokenizer | None) -> DrafterPlan:
    """Load what the configured drafters need. Raises ConfigError naming a drafter that can't work with the target."""
    known = (AUTO, "lookup", "mtp", "draft_model")
    for name in config.drafters:
        if name not in known:
            raise ConfigError(f"drafters: unknown drafter {name!r}; known: {', '.join(known)}")
    names = tuple(dict.fromkeys(n for name in config.drafters for n in _resolve(name, target)))
    if "mtp" in names and not target.config.num_mtp_layers:
        raise ConfigError(f"drafters: 'mtp' reads the checkpoint's mtp.* head; {config.checkpoint} carries none")
    if ("draft_model" in names) != (config.draft_model is not None):
        raise ConfigError("draft_model: the directory and 'draft_model' in drafters belong together; one is missing")
    head = None
    if "mtp" in names:
        head = MtpHead(target, target.weights, config.draft_vocab_size)
    draft = _load_draft_model(config, target, tokenizer) if "draft_model" in names else None
    return DrafterPlan(config, names, head, draft)


def _resolve(name: str, target: Decoder) -> tuple[str, ...]:
    if name != AUTO:
        return (name,)
    return ("lookup", "mtp") if target.config.num_mtp_layers else ("lookup",)


def _load_draft_model(config: EngineConfig, target: Decoder, tokenizer: Tokenizer | None) -> Decoder:
    assert config.draft_model is not None, "checked with the drafters' names"
    try:
        draft = Decoder(config.draft_model, target.device)
    except CheckpointError as error:
        raise ConfigError(f"draft_model: {error}") from error
    if draft.config.vocab_size != target.config.vocab_size:
        raise ConfigError(
            f"draft_model: its vocabulary has {draft.config.vocab_size} tokens, the target's {target.config.vocab_size}"
        )
    context = config.max_context_len or target.config.max_position
    if draft.config.max_position < context:
        raise ConfigError(
            f"draft_model: its context of {draft.config.max_position} is shorter than the target's {context}"
        )
    own = Tokenizer(config.draft_model) if has_tokenizer(config.draft_model) else None
    if tokenizer is not None and own is not None and own.vocabulary() != tokenizer.vocabulary():
        raise ConfigError(f"draft_model: {config.draft_model} has another tokenizer than the target")
    return draft
