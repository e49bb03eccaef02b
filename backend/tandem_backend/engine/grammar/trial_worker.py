# SPDX-License-Identifier: Apache-2.0
"""The process in which grammars are tried: see trial.py. Run as a script, so that nothing of ours is imported.

Standard input: a line of JSON with the settings, then one with each grammar. Standard output: a line for each.
"""

import json
import resource
import signal
import sys
import threading

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Half of what threads usually have: what recurses too deep for a server does so here first.
STACK_BYTES = 4 << 20
MEMORY_BYTES = 8 << 30


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    settings = json.loads(sys.stdin.readline())
    tokenizer = LLTokenizer(settings["tokenizer"], n_vocab=settings["vocab_size"], eos_token=settings["eos_token_ids"])
    limits = LLParserLimits(max_lexer_states=settings["max_lexer_states"], verbose_errors=False)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    threading.stack_size(STACK_BYTES)
    for line in sys.stdin:
        source = json.loads(line)
        # Its default action ends the process, also within the library. CPU time: a busy machine refuses nothing.
        signal.setitimer(signal.ITIMER_PROF, settings["max_cpu_s"])
        thread = threading.Thread(target=_try, args=(tokenizer, source, limits))
        thread.start()
        thread.join()
        signal.setitimer(signal.ITIMER_PROF, 0)
        print("tried", flush=True)


def _try(tokenizer: LLTokenizer, source: str, limits: LLParserLimits) -> None:
    """What a server does with a grammar until its first token. An error is an answer too."""
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if not matcher.is_error():
        fork = matcher.deep_copy()
        fork.compute_ff_tokens()
        fork.compute_bitmask()


if __name__ == "__main__":
    main()
