# SPDX-License-Identifier: Apache-2.0
"""The gate over a server, with a client that answers from a table."""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from tandem_backend.errors import TandemError
from tandem_backend.types import Prompt
from tandem_backend.verification.gate import Difference, Line, Plan
from tandem_backend.verification.prompts import NamedPrompt
from tandem_backend.verification.report import Progress
from tandem_backend.verification.run import verify_server
from tandem_client import Chunk, ServerError, Usage

PROMPTS = [
    NamedPrompt("a", Prompt(text="one")),
    NamedPrompt("b", Prompt(messages=({"role": "user", "content": "two"},), tools=({"name": "f"},))),
    NamedPrompt("c", Prompt(token_ids=(1, 2))),
]
LOGPROB = -0.10000000149011612  # a float32


class TableClient:
    """Answers three tokens: alone without drafts, else one and then two. Drafters named in `logprobs` differ."""

    def __init__(self, logprobs: dict[str, Sequence[float]] | None = None, *, num_together: int = 0) -> None:
        self._logprobs = logprobs or {}
        self._together = threading.Barrier(num_together) if num_together else None
        self.requests: list[dict[str, Any]] = []

    def generate(self, prompt: str | None, **options: Any) -> Iterator[Chunk]:
        self.requests.append({"prompt": prompt, **options})
        drafter = options["sampling"].get("drafter", "default")
        if drafter == "unknown":
            raise ServerError("INVALID_ARG", "drafter: unknown")
        if self._together is not None and drafter != "none":
            self._together.wait(timeout=10)
        logprobs = self._logprobs.get(drafter, (LOGPROB,) * 3)
        sizes = (1, 1, 1) if drafter == "none" else (1, 2)
        for n, size in enumerate(sizes):
            start, is_last = sum(sizes[:n]), n == len(sizes) - 1
            yield Chunk(
                token_ids=(7, 8, 9)[start : start + size],
                logprobs=tuple(logprobs[start : start + size]),
                finish_reason="length" if is_last else None,
                usage=Usage(num_draft_tokens=0 if drafter == "none" else 4) if is_last else None,
            )


def run(client: TableClient, *drafters: str, parallel: int = 1) -> list[tuple[Line, Difference | None]]:
    plan = Plan(drafters, (parallel,), (None,), ("cold",))
    return list(verify_server(client, PROMPTS, 3, plan, Progress(lambda text: None)))  # type: ignore[arg-type]


def test_a_server_that_keeps_the_promise_passes() -> None:
    client = TableClient()
    ((line, difference), (plain, _)) = run(client, "default", "none")
    assert difference is None
    assert (line.num_prompts, line.num_tokens, line.num_draft_rows, line.acceptance_len) == (3, 9, 12, 2.0)
    assert plain.num_draft_rows == 0
    assert not plain.never_drafted
    assert [request["sampling"] for request in client.requests] == [{"drafter": "none"}] * 3 + [{}] * 3 + [
        {"drafter": "none"}
    ] * 3
    first, second, third = client.requests[:3]
    assert (first["prompt"], second["messages"], third["input_ids"]) == ("one", PROMPTS[1].prompt.messages, (1, 2))
    assert second["tools"] == ({"name": "f"},)
    assert all(request["logprobs"] and request["max_tokens"] == 3 for request in client.requests)


def test_requests_are_really_parallel() -> None:
    ((line, difference),) = run(TableClient(num_together=6), "lookup", parallel=6)
    assert difference is None
    assert line.num_prompts == 6


def test_one_bit_of_a_log_probability_is_a_difference() -> None:
    ((line, difference),) = run(TableClient({"mtp": (LOGPROB, -0.10000000894069672, LOGPROB)}), "mtp")
    assert (line.num_differing_tokens, line.num_differing_rows) == (0, 3)
    assert difference is not None
    assert (difference.trace, difference.output) == (0, 1)
    plain, here = difference.explanation.splitlines()
    assert plain == "  plain: token 8, log-probability -0.100000001 (0xbdcccccd)"
    assert here == "  here:  token 8, log-probability -0.100000009 (0xbdccccce)"


def test_an_error_of_the_server_names_the_prompt() -> None:
    with pytest.raises(TandemError, match=r"prompt 'a', drafter 'unknown': \[INVALID_ARG\] drafter: unknown"):
        run(TableClient(), "unknown")


def test_an_answer_without_log_probabilities_proves_nothing() -> None:
    with pytest.raises(TandemError, match="3 tokens were decoded and 0 rows recorded"):
        run(TableClient({"none": ()}), "default")
