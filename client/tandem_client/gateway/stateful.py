# SPDX-License-Identifier: Apache-2.0
"""What of a gateway outlives a request: its conversations' sequences, which ones were answered, and the journal."""

import asyncio

from tandem_client.gateway.backend import Backend
from tandem_client.gateway.calls import Call, Hooks
from tandem_client.gateway.conversations import ConversationAnswer, Conversations
from tandem_client.gateway.digests import message_digests, named_digest
from tandem_client.gateway.errors import invalid
from tandem_client.gateway.journal import Journal
from tandem_client.gateway.journaling import note_call, note_chunk
from tandem_client.gateway.metrics import Metrics
from tandem_client.gateway.regenerate import Answered, read_header
from tandem_client.gateway.sampling_choice import SAMPLING_FIELDS, SamplingChooser
from tandem_client.gateway.sampling_settings import read_generation_config
from tandem_client.gateway.settings import Settings
from tandem_client.types import Chunk

SESSION_HEADER = "X-Tandem-Session"
_MAX_NAME_LEN = 256
_MAX_ANSWERED = 100_000  # conversations, of some 150 bytes
_SECONDS_A_DAY = 86_400
_COMPLETE = {"stop", "length", "tool_calls"}


class StatefulHooks(Hooks):
    """Any request may come to any gateway: what this one does not remember costs time, never a right answer.

    Raises ValueError naming the file that can't be used.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        answered = Answered(max_entries=_MAX_ANSWERED, window_s=settings.regenerate_window_s)
        self._chooser = SamplingChooser(
            answered=answered if settings.regenerate else None,
            regenerate=settings.regenerate_sampling,
            loop_turns=settings.loop_turns if settings.loop_escape else 0,
            loop_escape=read_generation_config(settings.generation_config),
        )
        self._conversations: dict[str, Conversations] = {}  # by model
        self.journal: Journal | None = None
        if settings.journal is not None:
            max_age_s = settings.journal_days * _SECONDS_A_DAY
            self.journal = Journal(settings.journal, max_age_s=max_age_s, max_rows=settings.journal_rows)

    def watch(self, metrics: Metrics) -> None:
        """Show what there is among the gateway's metrics."""
        metrics.watch("sequences", "Conversations with a sequence of their own.", self._num_sequences)
        if self.journal is not None:
            journal = self.journal
            metrics.watch("journal_rows_written", "Since the start.", lambda: journal.num_written)
            metrics.watch("journal_rows_dropped", "Since the start: too many waited.", lambda: journal.num_dropped)

    async def prepare(self, call: Call) -> None:
        """Choose how the answer is sampled."""
        note_call(call)
        messages = call.options.get("messages")
        if not messages:
            call.sampling_mode = "as_sent" if call.sent & SAMPLING_FIELDS else "greedy"
            return
        call.digests = message_digests(_scope(call), messages)
        sent = call.options.get("sampling") or {}
        again = read_header(call.headers)
        choice = self._chooser.choose(call.digests[-1], messages, sent=call.sent, seed=sent.get("seed"), again=again)
        sampling = {**choice.values, **sent}
        call.sampling_mode = choice.mode
        call.sampling_values = {name: sampling[name] for name in choice.values}
        call.options["sampling"] = sampling

    def generation(self, call: Call, backend: Backend) -> ConversationAnswer | None:
        """In the sequence of the call's conversation."""
        if not call.digests:
            return None
        if call.model not in self._conversations:
            self._conversations[call.model] = Conversations(
                backend.client(call.model),
                max_sequences=self._settings.max_sequences,
                idle_s=self._settings.sequence_idle_s,
            )
        name = call.headers.get(SESSION_HEADER.lower())
        if name is not None and not 0 < len(name) <= _MAX_NAME_LEN:
            raise invalid(SESSION_HEADER, f"must have 1 to {_MAX_NAME_LEN} characters, got {len(name)}")
        digest = None if name is None else named_digest(_scope(call), name)
        return self._conversations[call.model].generate(call.digests, call.options, name=digest)

    def chunk(self, call: Call, chunk: Chunk) -> None:
        """Keep its text, where the journal shall have it."""
        if self._settings.journal_text:
            note_chunk(call, chunk)

    def ended(self, call: Call) -> None:
        """Remember that the conversation was answered."""
        is_complete = call.error is None and call.finish_reasons and set(call.finish_reasons.values()) <= _COMPLETE
        if call.digests and is_complete:
            self._chooser.note_answer(call.digests[-1])

    def _num_sequences(self) -> int:
        return sum(map(len, self._conversations.values()))

    async def close(self) -> None:
        """End the sequences, and write what the journal still waits for."""
        for conversations in self._conversations.values():
            await conversations.close()
        if self.journal is not None:
            await asyncio.to_thread(self.journal.close)


def _scope(call: Call) -> list[object]:
    """What a conversation hangs on beside its messages: whose it is, and all that the template writes before them."""
    sampling = call.options.get("sampling") or {}
    return [
        *(call.key_name, sampling.get("cache_salt"), call.model),
        *(call.options.get("tools"), call.options.get("tool_choice") == "none"),
        *(call.options.get("chat_template_kwargs"), sampling.get("reasoning_effort")),
    ]
