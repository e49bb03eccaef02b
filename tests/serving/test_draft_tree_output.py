# SPDX-License-Identifier: Apache-2.0
"""The output `draft_trees`: its schema, deltas in a stream, the sum in one response, one element a choice."""

import json
from pathlib import Path
from typing import Any

import pytest
from fakes.engine import chunk
from fakes.pb_utils import ResponseSender
from tandem_backend.engine.tokenizer import Tokenizer
from tandem_backend.serving.choices import choice_senders
from tandem_backend.serving.draft_trees import DraftTreeWriter
from tandem_backend.serving.request import ResponseOptions
from tandem_backend.serving.response import Responder
from tandem_backend.types import FinishReason, Prompt, Request, RoundTree, SamplingParams, StepOutput, join_outputs

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "model_repository" / "tandem" / "1" / "tandem-pydoc"
STREAM = ResponseOptions(stream=True, return_draft_trees=True)
WHOLE = ResponseOptions(return_draft_trees=True)
PROMPT_PASS = RoundTree(index=0, num_tokens=1, path=())
DRAFTED = RoundTree(
    index=1,
    num_tokens=2,
    path=(2,),
    proposers=("mtp",),
    token_ids=(7, 5, 8, 9),
    parents=(-1, 0, 0, 2),
    scores=(1.0, 0.25, 0.123456, 0.5),
    drafters=("", "lookup", "mtp", "mtp"),
)
LEFT_OUT = RoundTree(index=2, num_tokens=1, path=(3,), proposers=("lookup",), token_ids=None)
ROUNDS = [
    chunk("a", token_ids=(7,), logprobs=(-1.0,), rounds=(PROMPT_PASS,)),
    chunk("b c", token_ids=(8, 4), logprobs=(-1.0, -1.0), rounds=(DRAFTED,)),
    chunk("d", token_ids=(6,), logprobs=(-1.0,), rounds=(LEFT_OUT,), finish_reason=FinishReason.STOP),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(CHECKPOINT)


def told(rounds: list[StepOutput], options: ResponseOptions, tokenizer: Tokenizer | None = None) -> list[Any]:
    """`draft_trees` of each response."""
    sender = ResponseSender()
    responder = Responder(sender, options, trees=DraftTreeWriter(tokenizer))
    for output in rounds:
        responder.output(output)
    assert sender.num_finals == 1
    return [json.loads(response.value("draft_trees")[0]) for response in sender.responses]


def without_texts(found: dict[str, Any]) -> Any:
    """As if the model had no tokenizer."""
    nodes = [node for tree in found["rounds"] for node in tree["nodes"] or ()]
    for item in (*found["tokens"], *nodes):
        item["text"] = None
    return found


def test_each_response_tells_its_tokens_and_the_rounds_that_gave_them() -> None:
    first, second, last = told(ROUNDS, STREAM)
    assert first == {
        "tokens": [{"token_id": 7, "text": None, "round": 0, "drafter": None, "node": None}],
        "rounds": [{"round": 0, "nodes": []}],
    }
    assert second["tokens"] == [
        {"token_id": 8, "text": None, "round": 1, "drafter": "mtp", "node": 2},
        {"token_id": 4, "text": None, "round": 1, "drafter": None, "node": None},
    ]
    (tree,) = second["rounds"]
    assert tree["round"] == 1
    assert tree["nodes"][0] == {
        "token_id": 7,
        "text": None,
        "parent": None,
        "drafter": None,
        "score": 1.0,
        "accepted": True,
    }
    found = [(node["token_id"], node["parent"], node["drafter"], node["accepted"]) for node in tree["nodes"][1:]]
    assert found == [(5, 0, "lookup", False), (8, 0, "mtp", True), (9, 2, "mtp", False)]
    assert [node["score"] for node in tree["nodes"]] == [1.0, 0.25, 0.1235, 0.5]
    assert last["rounds"] == [{"round": 2, "nodes": None}]
    assert last["tokens"][0] == {"token_id": 6, "text": None, "round": 2, "drafter": "lookup", "node": 3}


def test_one_response_tells_all_that_a_stream_does(tokenizer: Tokenizer) -> None:
    streamed = told(ROUNDS, STREAM, tokenizer)
    joined = {name: [item for part in streamed for item in part[name]] for name in ("tokens", "rounds")}
    assert told(ROUNDS, WHOLE, tokenizer) == [joined]
    assert told([join_outputs(ROUNDS)], STREAM, tokenizer) == [joined]  # the outbox joins what waits
    assert without_texts(joined)["tokens"] == [token for part in told(ROUNDS, STREAM) for token in part["tokens"]]


def test_texts_of_tokens_join_to_the_answer(tokenizer: Tokenizer) -> None:
    answer = "Grüße, 東京! 🙂"
    token_ids = tokenizer.encode(answer, add_special_tokens=False)
    rounds = [
        chunk(token_ids=(token_id,), logprobs=(-1.0,), rounds=(RoundTree(index=n, num_tokens=1, path=()),))
        for n, token_id in enumerate(token_ids)
    ]
    (found,) = told([*rounds, chunk(finish_reason=FinishReason.STOP)], WHOLE, tokenizer)
    assert "".join(token["text"] for token in found["tokens"]) == answer


def test_a_kept_answer_has_neither_tokens_nor_rounds(tokenizer: Tokenizer) -> None:
    kept = chunk("a b", finish_reason=FinishReason.STOP)
    assert told([kept], STREAM, tokenizer) == [{"tokens": [], "rounds": []}]


def test_an_end_without_tokens_tells_nothing_more(tokenizer: Tokenizer) -> None:
    *_, last = told([ROUNDS[0], chunk(finish_reason=FinishReason.CANCELLED)], STREAM, tokenizer)
    assert last == {"tokens": [], "rounds": []}


@pytest.mark.parametrize("options", [STREAM, WHOLE])
def test_every_choice_tells_its_own(options: ResponseOptions) -> None:
    sender = ResponseSender()
    request = Request(request_id="r", prompt=Prompt(text="x"), params=SamplingParams(num_choices=2))
    senders = choice_senders(sender, request, 7, is_streaming=options.stream)
    one, two = (Responder(own, options, choice=choice, trees=DraftTreeWriter(None)) for own, choice in senders)
    one.output(ROUNDS[0])
    two.output(ROUNDS[2])
    one.output(chunk(finish_reason=FinishReason.STOP))
    parts: dict[int, list[Any]] = {0: [], 1: []}
    for response in sender.responses:
        for index, text in zip(response.value("choice_index"), response.value("draft_trees"), strict=True):
            parts[index] += [token["token_id"] for token in json.loads(text)["tokens"]]
    assert parts == {0: [7], 1: [6]}


def test_who_does_not_ask_gets_no_such_output() -> None:
    sender = ResponseSender()
    responder = Responder(sender, ResponseOptions())
    responder.output(ROUNDS[-1])
    assert sender.responses[0].value("draft_trees") is None


def test_both_models_declare_it() -> None:
    for model in ("tandem", "tandem_generate"):
        config = (ROOT / "model_repository" / model / "config.pbtxt").read_text(encoding="utf-8")
        assert '{ name: "return_draft_trees" data_type: TYPE_BOOL dims: [ 1 ] optional: true }' in config
        assert '{ name: "draft_trees" data_type: TYPE_STRING dims: [ -1 ] }' in config


def test_a_node_has_its_tokens_own_text(tokenizer: Tokenizer) -> None:
    token_ids = (*tokenizer.encode("a é", add_special_tokens=False), tokenizer.vocabulary()["<|im_end|>"])
    tree = RoundTree(
        index=1,
        num_tokens=1,
        path=(),
        token_ids=token_ids,
        parents=tuple(range(-1, len(token_ids) - 1)),
        scores=(1.0,) * len(token_ids),
        drafters=("", *["lookup"] * (len(token_ids) - 1)),
    )
    (found,) = told([chunk("x", rounds=(tree,), finish_reason=FinishReason.STOP)], WHOLE, tokenizer)
    texts = [node["text"] for node in found["rounds"][0]["nodes"]]
    assert texts[0] == "a"
    assert texts[-1] == "<|im_end|>"  # shown here; as a token of an answer it has no text
