# SPDX-License-Identifier: Apache-2.0
"""TextOutput: a request's text as it may be shown. Nothing is given out that a stop string could still take back."""

from tandem_backend.engine.tokenizer import Tokenizer


class TextOutput:
    """Feeds tokens to the detokenizer and watches for stop strings."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...], *, include_stop: bool) -> None:
        self._stream = tokenizer.stream()
        self._stop, self._include_stop = stop, include_stop
        self._held = ""
        self.text = ""  # all that was given out

    def push(self, token_id: int, *, may_stop: bool) -> tuple[str, bool]:
        """Text that the token makes final, and whether it completed a stop string (then the text ends there)."""
        self._held += self._stream.push(token_id)
        if not may_stop:
            return self._give(len(self._held)), False
        cut = self._find_stop()
        if cut is not None:
            given = self._give(cut)
            self._held = ""
            return given, True
        return self._give(len(self._held) - self._num_possible()), False

    def flush(self) -> str:
        """The rest, once the request has ended without a stop string."""
        self._held += self._stream.flush()
        return self._give(len(self._held))

    def _give(self, n: int) -> str:
        given, self._held = self._held[:n], self._held[n:]
        self.text += given
        return given

    def _find_stop(self) -> int | None:
        """Where the text ends, by the stop string that is complete first."""
        found = [(at + len(stop), at) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if not found:
            return None
        end, start = min(found)
        return end if self._include_stop else start

    def _num_possible(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for n in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-n:]) for stop in self._stop):
                return n
        return 0
