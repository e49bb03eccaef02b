# SPDX-License-Identifier: Apache-2.0
"""How an answer is sampled: as its client says; else greedily, unless it is regenerated or leads out of a loop."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from tandem_client.gateway.errors import invalid
from tandem_client.gateway.loop_escape import is_looping
from tandem_client.gateway.regenerate import HEADER, Answered
from tandem_client.gateway.sampling_settings import SamplingSettings
from tandem_client.gateway.seeds import fresh_seed, mode_of

# A request with any of these has chosen for itself.
SAMPLING_FIELDS = frozenset({"temperature", "top_k", "top_p", "min_p", "typical_p", "seed"})


@dataclass(frozen=True, slots=True)
class SamplingChoice:
    """mode: "greedy", "as_sent", "regenerate" or "loop_escape". values: what the gateway adds to the request, its seed
    included: sent by the client, they give the same answer again."""

    mode: str
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SamplingChooser:
    """Chooses for chats. `answered` None: regeneration is off; loop_turns 0: loop escape is."""

    answered: Answered | None
    regenerate: SamplingSettings
    loop_turns: int
    loop_escape: SamplingSettings

    def choose(
        self,
        digest: bytes,
        messages: Sequence[Mapping[str, Any]],
        *,
        sent: AbstractSet[str],
        seed: object = None,
        again: bool | None = None,
    ) -> SamplingChoice:
        """For the conversation `digest`, whose request has the fields `sent`.

        again: what X-Tandem-Regenerate says. Raises ApiError 400 where it asks for what is turned off.
        """
        if again and self.answered is None:
            raise invalid(HEADER, "regeneration is turned off here, so 1 can't be honoured")
        chosen = sent & SAMPLING_FIELDS
        if chosen:
            mode = mode_of(seed, digest) if chosen == {"seed"} else None
            return self._sampled(mode, seed) if mode is not None and self._is_on(mode) else SamplingChoice("as_sent")
        if self.loop_turns and is_looping(messages, self.loop_turns):
            return self._sampled("loop_escape", fresh_seed("loop_escape", digest))
        if again or (again is None and self.answered is not None and digest in self.answered):
            return self._sampled("regenerate", fresh_seed("regenerate", digest))
        return SamplingChoice("greedy")

    def note_answer(self, digest: bytes) -> None:
        """The conversation was answered completely: sent again, it wants another answer."""
        if self.answered is not None:
            self.answered.add(digest)

    def _is_on(self, mode: str) -> bool:
        return self.answered is not None if mode == "regenerate" else self.loop_turns > 0

    def _sampled(self, mode: str, seed: object) -> SamplingChoice:
        settings = self.regenerate if mode == "regenerate" else self.loop_escape
        return SamplingChoice(mode, {**settings.values(), "seed": seed})
