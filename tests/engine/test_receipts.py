# SPDX-License-Identifier: Apache-2.0
"""Receipts of a busy, speculating, cache-warm engine are confirmed by a replay; an edited byte is caught."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_driver import EngineDriver, engine_config
from tandem_backend.engine.receipts import Receipt, _line
from tandem_backend.errors import InvalidRequestError
from tandem_backend.types import Grammar, GrammarKind, Prompt, Request, SamplingParams
from tandem_backend.verification.audit import Auditor, Verdict

PARAMS = {
    "greedy": SamplingParams(max_tokens=24),
    "seeded": SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, seed=7),
    "unseeded": SamplingParams(max_tokens=24, temperature=1.0),
    "penalties": SamplingParams(max_tokens=24, repetition_penalty=1.3, no_repeat_ngram_size=3, min_tokens=5),
    "logprobs": SamplingParams(
        max_tokens=24, num_logprobs=3, logprobs_mode="processed", top_k=5, temperature=0.5, seed=1
    ),
    "stops": SamplingParams(max_tokens=24, stop=("a", "e"), include_stop=True),
    "grammar": SamplingParams(
        max_tokens=24, grammar=Grammar(kind=GrammarKind.REGEX, source="[ab]{3,9}c", field="guided_regex")
    ),
    "limited": SamplingParams(),
}


@pytest.fixture(scope="module")
def auditor(text_model: Path) -> Auditor:
    return Auditor(text_model, num_threads=1)


@pytest.fixture(scope="module")
def receipts(text_model: Path) -> dict[str, str]:
    """All kinds at once, twice, in one engine with drafts and caches; the second time prefixes are cached."""
    config = engine_config(text_model, drafters=("lookup",), router="always", default_max_tokens=17)
    driver, found = EngineDriver(config), {}
    for attempt in range(2):
        for name, params in PARAMS.items():
            request_id = f"{name} {attempt}"
            prompt = Prompt(text=f"Hello {name}, hello again and again and again")
            driver.add(Request(request_id=request_id, prompt=prompt, params=params, return_receipt=True))
        driver.finish()
    for request_id, result in driver.results.items():
        assert result.error is None, result.error
        assert result.receipt is not None
        found[request_id] = result.receipt
    return found


@pytest.mark.parametrize("name", [f"{name} {attempt}" for attempt in range(2) for name in PARAMS])
def test_a_receipt_is_confirmed(auditor: Auditor, receipts: dict[str, str], name: str) -> None:
    finding = auditor.audit(receipts[name])
    assert finding.verdict is Verdict.CONFIRMED, finding.why
    assert f"{Receipt.load(receipts[name]).num_output_tokens} tokens" in finding.why


def test_turns_of_a_session_are_confirmed(auditor: Auditor, text_model: Path) -> None:
    driver = EngineDriver(engine_config(text_model, drafters=("lookup",), router="always"))
    for n, (start, end) in enumerate([(True, False), (False, False), (False, True)]):
        request = Request(
            request_id=str(n),
            prompt=Prompt(text=f"turn {n}"),
            params=SamplingParams(max_tokens=9, frequency_penalty=0.5),
            sequence_id=1,
            sequence_start=start,
            sequence_end=end,
            return_receipt=True,
        )
        receipt = driver.run(request).receipt
        assert receipt is not None
        assert auditor.audit(receipt).verdict is Verdict.CONFIRMED


def test_a_cancelled_answer_is_confirmed_as_far_as_it_went(auditor: Auditor, text_model: Path) -> None:
    driver = EngineDriver(engine_config(text_model))
    request = Request(
        request_id="a",
        prompt=Prompt(text="Hello"),
        params=SamplingParams(max_tokens=200, ignore_eos=True),
        return_receipt=True,
    )
    driver.add(request)
    while len(driver.results["a"].token_ids) < 5:
        driver.step()
    driver.engine.cancel("a")
    driver.finish()
    receipt = driver.results["a"].receipt
    assert receipt is not None
    finding = auditor.audit(receipt)
    assert (finding.verdict, finding.why) == (Verdict.CONFIRMED, "5 tokens, bit for bit")


def test_every_edited_byte_is_caught(auditor: Auditor, receipts: dict[str, str]) -> None:
    receipt = receipts["seeded 0"]
    for position in range(len(receipt)):
        other = "1" if receipt[position] == "0" else "0"
        finding = auditor.audit(receipt[:position] + other + receipt[position + 1 :])
        assert finding.verdict is Verdict.REFUTED, position


def edited(receipt: str, edit: Callable[[dict[str, Any]], None]) -> str:
    """With a digest that fits: only a replay can find what is wrong."""
    values = json.loads(receipt)
    del values["digest"]
    edit(values)
    return _line(values)


def change_token(values: dict[str, Any]) -> None:
    marks = values["trail"]
    values["trail"] = marks[:24] + "00000000" + marks[32:]


def change_hash(values: dict[str, Any]) -> None:
    values["logprobs_hash"] = "0" * 64


def change_output(values: dict[str, Any]) -> None:
    values["output_hash"] = "0" * 64


def change_prompt(values: dict[str, Any]) -> None:
    values["prompt_ids"][3] ^= 1


def change_seed(values: dict[str, Any]) -> None:
    values["params"]["seed"] = 8


def change_reason(values: dict[str, Any]) -> None:
    values["finish_reason"] = "stop"


def drop_last(values: dict[str, Any]) -> None:
    values["num_output_tokens"] -= 1
    values["trail"] = values["trail"][:-8]


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (change_token, "output token 3 differs"),
        (change_hash, "hashes of the whole output differ"),
        (change_output, "hashes of the whole output differ"),
        (change_prompt, "prompt_hash"),
        (change_seed, "output token"),
        (change_reason, "it ends with length, not stop"),
        (drop_last, "hashes of the whole output differ"),
    ],
)
def test_a_false_receipt_with_a_fitting_digest_is_refuted(
    auditor: Auditor, receipts: dict[str, str], edit: Callable[[dict[str, Any]], None], why: str
) -> None:
    finding = auditor.audit(edited(receipts["seeded 0"], edit))
    assert finding.verdict is Verdict.REFUTED
    assert why in finding.why


@pytest.mark.parametrize("field", ["weights", "tokenizer", "kernels", "device"])
def test_another_build_can_not_judge(auditor: Auditor, receipts: dict[str, str], field: str) -> None:
    finding = auditor.audit(edited(receipts["greedy 0"], lambda values: values["fingerprint"].update({field: "other"})))
    assert finding.verdict is Verdict.NOT_JUDGED
    assert finding.why == f"other {field} than here"


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "\x00", '{"format": 2}', "[" * 10000])
def test_what_is_no_receipt_is_refuted(auditor: Auditor, text: str) -> None:
    assert auditor.audit(text).verdict is Verdict.REFUTED


def test_an_answer_that_depends_on_drafts_gets_none(text_model: Path) -> None:
    driver = EngineDriver(engine_config(text_model, allow_relaxed_acceptance=True))
    request = Request(
        request_id="a", prompt=Prompt(text="Hello"), params=SamplingParams(relax_tau=0.5), return_receipt=True
    )
    with pytest.raises(InvalidRequestError, match=r"^return_receipt: "):
        driver.add(request)
    driver.run(replace(request, return_receipt=False))
