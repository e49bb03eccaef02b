# SPDX-License-Identifier: Apache-2.0
"""Sequences of a real Triton server are sessions: opened, continued, ended, begun anew, swept, and too many of them."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from small_server import IDLE_S, LIMITS, NUM_CANDIDATES
from tokenizers import Tokenizer
from triton_calls import (
    EXACTLY,
    FULL_ANSWER,
    MODEL_REPOSITORY,
    PROMPT,
    Answer,
    GrpcStream,
    ask,
    metrics,
    wait_until,
    wait_until_free,
)
from tritonclient.utils import InferenceServerException

LONG = {"text_input": PROMPT, "max_tokens": 3000, "sampling_parameters": EXACTLY}
SHORT = {"text_input": PROMPT, "max_tokens": 2, "sampling_parameters": EXACTLY}


@pytest.fixture
def stream(server: Any) -> Iterator[GrpcStream]:
    with GrpcStream(server.grpc_url) as opened:
        yield opened


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_REPOSITORY / "tandem" / "1" / "tandem-pydoc" / "tokenizer.json"))


def test_three_turns_continue_one_context(stream: GrpcStream, tokenizer: Tokenizer) -> None:
    turns = ["# os.path\n", "\n# json\n", "\n# re\n"]
    context: list[int] = []
    for number, text in enumerate(turns):
        flags = {0: "S", 2: "E"}.get(number, "")
        request = {"text_input": text, "max_tokens": 8, "sampling_parameters": EXACTLY}
        turn = stream.answer(request_id=str(number), sequence=("three-turns", flags), **request)
        context += tokenizer.encode(text).ids
        whole = stream.answer(input_ids=context, max_tokens=8, sampling_parameters=EXACTLY, request_id="whole")
        assert turn == whole
        context += turn.token_ids
    with pytest.raises(InferenceServerException, match="START"):
        stream.answer(text_input="more", sequence=("three-turns", ""))


@pytest.mark.parametrize("sequence_id", [77, 2**63 - 1, "77", "Ünïcode 😀"])
def test_numbers_and_text_are_sequence_ids(stream: GrpcStream, sequence_id: int | str) -> None:
    cached = []
    for flags in ("S", "", "E"):
        stream.send(flags, sequence=(sequence_id, flags), return_perf_metrics=True, **SHORT)
        (answer,) = stream.responses(flags)
        cached.append(answer.num_cached_tokens)
    assert cached[0] < cached[1] < cached[2]  # follow-ups send the new turn only


def test_two_requests_of_one_sequence_at_once_are_turns(server: Any, stream: GrpcStream) -> None:
    requests: list[dict[str, Any]] = [
        {"sequence": ("at-once", "S"), "text_input": PROMPT, "max_tokens": 12},
        {"sequence": ("at-once", "E"), "text_input": "\n# next\n", "max_tokens": 12},
    ]
    for number, request in enumerate(requests):
        stream.send(str(number), stream=True, **FULL_ANSWER, **request)
    answers = [Answer(list(stream.responses(str(number)))) for number in range(2)]
    one_by_one = [ask(server, **request | {"sequence": ("one-by-one", request["sequence"][1])}) for request in requests]
    assert answers == one_by_one


def test_start_on_a_live_sequence_begins_anew(stream: GrpcStream) -> None:
    stream.send("old", sequence=("again", "S"), stream=True, **FULL_ANSWER, **LONG)
    old = stream.responses("old")
    next(old)
    new = stream.answer(request_id="new", text_input=PROMPT, max_tokens=6, sequence=("again", "SE"))
    assert new == stream.answer(request_id="alone", text_input=PROMPT, max_tokens=6)
    assert list(old)[-1].finish_reason == "cancelled"


def test_stop_cancels_and_drops_the_sequence(stream: GrpcStream) -> None:
    stream.send("long", sequence=("stopped", "S"), stream=True, **FULL_ANSWER, **LONG)
    running = stream.responses("long")
    next(running)
    stream.send("stop", sequence=("stopped", "E"), stop=True)
    (closed,) = stream.responses("stop")
    assert closed.text_output == ""
    assert list(running)[-1].finish_reason == "cancelled"
    with pytest.raises(InferenceServerException, match="START"):
        stream.answer(text_input="more", sequence=("stopped", ""))


def test_an_id_may_be_used_again_after_its_end(stream: GrpcStream) -> None:
    alone = stream.answer(request_id="alone", **SHORT)
    for number in range(3):
        assert stream.answer(request_id=str(number), sequence=("reused", "SE"), **SHORT) == alone
        assert stream.answer(request_id=f"open {number}", sequence=("reused", "S"), **SHORT) == alone


def test_500_short_sequences(server: Any) -> None:
    first = ask(server, **SHORT)
    second = ask(server, sequence=("model", "S"), **SHORT)
    assert second == first
    second = ask(server, sequence=("model", "E"), **SHORT)
    wrong: list[Answer] = []

    def converse(client: int) -> None:
        with GrpcStream(server.grpc_url) as opened:
            for number in range(client, 500, 8):
                turns = [opened.answer(request_id=f"{number} {f}", sequence=(number + 1000, f), **SHORT) for f in "SE"]
                wrong.extend(turn for turn, right in zip(turns, (first, second), strict=True) if turn != right)

    threads = [threading.Thread(target=converse, args=(client,)) for client in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# With small limits.


def test_the_least_recently_used_session_makes_room(small_server: Any) -> None:
    before = metrics(small_server)['tandem_ended_sessions_total{reason="memory"}']
    with GrpcStream(small_server.grpc_url) as opened:
        for number in range(LIMITS["max_sessions"] + 1):
            opened.answer(request_id=str(number), sequence=(f"lru-{number}", "S"), **SHORT)
        with pytest.raises(InferenceServerException, match=r"\[INVALID_ARG\] sequence_id: .*dropped for memory"):
            opened.answer(request_id="first", sequence=("lru-0", ""), **SHORT)
        for number in range(1, LIMITS["max_sessions"] + 1):
            opened.answer(request_id=f"end {number}", sequence=(f"lru-{number}", "E"), **SHORT)
    wait_until_free(small_server)
    wait_until(lambda: metrics(small_server)['tandem_ended_sessions_total{reason="memory"}'] == before + 1)


def test_idle_sessions_are_swept_and_never_while_they_generate(small_server: Any) -> None:
    """Triton server lets the busy sequence go by its own clock, which starts at the request; its text goes on."""
    before = metrics(small_server)['tandem_ended_sessions_total{reason="idle"}']
    with GrpcStream(small_server.grpc_url) as opened:
        opened.send("busy", sequence=("busy", "S"), stream=True, **LONG, **FULL_ANSWER)
        running = opened.responses("busy")
        beginning = [next(running)]
        started_s = time.monotonic()
        for number in range(2):
            opened.answer(request_id=str(number), sequence=(f"idle-{number}", "S"), **SHORT)
        answer = Answer([*beginning, *running])
        assert (answer.finish_reason, answer.num_output_tokens) == ("length", 3000)
        wait_until_free(small_server)
        assert time.monotonic() - started_s >= IDLE_S
        wait_until(lambda: metrics(small_server)['tandem_ended_sessions_total{reason="idle"}'] == before + 3)
        with pytest.raises(InferenceServerException, match="START"):
            opened.answer(request_id="late", sequence=("idle-0", ""), **SHORT)


def test_more_sequences_than_triton_server_takes_wait_for_idle_ones(small_server: Any) -> None:
    """Further ones wait in silence until open ones were idle for long enough; then all are served."""
    streams = [GrpcStream(small_server.grpc_url) for _ in range(NUM_CANDIDATES + 2)]
    for number, opened in enumerate(streams):
        opened.send(sequence=(f"candidate-{number}", "S"), stream=True, **SHORT, **FULL_ANSWER)
        if number < NUM_CANDIDATES:
            assert Answer(list(opened.responses())).num_output_tokens == 2
    for opened in streams[NUM_CANDIDATES:]:
        assert Answer(list(opened.responses())).num_output_tokens == 2
    for opened in streams:
        opened.cancel()
    wait_until(lambda: metrics(small_server)["tandem_num_sessions"] == 0)
    wait_until_free(small_server)
