# SPDX-License-Identifier: Apache-2.0
"""GrammarTrial: whether a grammar can be compiled at all, found out where it does no harm.

llguidance can't be interrupted: `multipleOf` 99999999 takes it hours, and a chain of 5,000 rules overflows the stack,
which ends the process. So each new grammar is tried first in a process of its own, with bounds on CPU time, stack and
memory.
"""

import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

WORKER = Path(__file__).with_name("trial_worker.py")
MAX_CPU_S = 1.0


class GrammarTrial:
    """Thread-safe. The process starts with the first grammar, serves them one by one, and ends with this object."""

    def __init__(
        self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int], max_lexer_states: int
    ) -> None:
        self._settings = json.dumps(
            {
                "tokenizer": tokenizer_json,
                "vocab_size": vocab_size,
                "eos_token_ids": list(eos_token_ids),
                "max_lexer_states": max_lexer_states,
                "max_cpu_s": MAX_CPU_S,
            }
        )
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._end: weakref.finalize[..., GrammarTrial] | None = None

    def refusal(self, source: str) -> str | None:
        """Why the grammar can't be taken, `source` being llguidance's form of it; None where it can be compiled.

        A grammar with an error compiles: to that error.
        """
        with self._lock:
            process = self._process = self._process or self._start()
            if self._ask(process, source):
                return None
            self._process = None
            assert self._end is not None
            self._end()
        if process.returncode == -signal.SIGPROF:
            return f"compiling it takes more than {MAX_CPU_S:g} s of CPU time; send a simpler one"
        return "it is too deep or too large to be compiled; send a simpler one"

    def _start(self) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        self._end = weakref.finalize(self, _end, process)
        with suppress(BrokenPipeError):  # seen again when it is asked
            self._write(process, self._settings)
        return process

    def _ask(self, process: "subprocess.Popen[str]", source: str) -> bool:
        """Whether the process lives to answer."""
        try:
            self._write(process, json.dumps(source))
        except BrokenPipeError:
            return False
        assert process.stdout is not None
        return bool(process.stdout.readline())

    def _write(self, process: "subprocess.Popen[str]", line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()


def _end(process: "subprocess.Popen[str]") -> None:
    """Let go of the process: it ends with its input, or has ended, or is ended by its bound on CPU time."""
    with suppress(BrokenPipeError):
        process.communicate()
