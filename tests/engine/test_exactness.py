# SPDX-License-Identifier: Apache-2.0
"""Every request gets plain decoding's tokens and logits rows to the bit, whatever is drafted, whoever shares a pass."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine_driver import DEVICE, VOCAB_SIZE, EngineDriver, Plain, beginning, engine_config, num_different
from fakes.tiny_model import tiny_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tandem_backend.engine.drafters.base import Drafter
from tandem_backend.engine.drafters.mtp import MtpDrafter
from tandem_backend.engine.drafters.scripted import ScriptedDrafter
from tandem_backend.model.checkpoint import Checkpoint
from tandem_backend.model.decoder import Decoder
from tandem_backend.model.mtp import MtpHead
from tandem_backend.model.mtp_passes import LaunchedMtp
from tandem_backend.model.state import KV_BLOCK, allocate_kv_layer
from tandem_backend.types import FinishReason, Prompt, Request, SamplingParams
from tandem_kernels import find_device

_RNG = random.Random(0)
PROMPTS = [tuple(_RNG.choices(range(3, VOCAB_SIZE), k=n)) for n in (1, 2, 3, 9, 17, 40, 62, 63, 64, 65, 80, 130)]
REPEATING = tuple(_RNG.choices(range(3, VOCAB_SIZE), k=6)) * 6
DRAFTERS = (
    "wrong",
    "half",
    "oracle",
    "lookup",
    "mtp",
    "mtp_tree",
    "mtp_bush",
    "mtp+lookup",
    "draft_model",
    "wrong+half+oracle+lookup+mtp+mtp_tree+draft_model",
)
FEW = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclass(frozen=True)
class Arrival:
    """A request, the step at which it comes and the step, if any, at which it is cancelled."""

    prompt: tuple[int, ...]
    params: SamplingParams
    step: int
    cancelled: int | None


# Each of them alone and with all others; a seed is drawn for every request.
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"typical_p": 0.7},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7},
    {"frequency_penalty": -0.4},
    {"no_repeat_ngram_size": 2},
    {"logit_bias": ((3, 1.5), (7, -100.0))},
    {"allowed_token_ids": tuple(range(0, VOCAB_SIZE, 2))},
    {"num_logprobs": 3},
    {"num_logprobs": 20, "logprobs_mode": "processed"},
    {"prompt_logprobs": 2},
)


@st.composite
def sampling_options(draw: st.DrawFn) -> dict[str, Any]:
    chosen = draw(st.one_of(st.just([]), st.lists(st.sampled_from(OPTIONS), max_size=len(OPTIONS), unique_by=id)))
    options = {"temperature": draw(st.sampled_from([0.0, 0.7, 2.0])), "seed": draw(st.integers(0, 2**64 - 1))}
    return {} if not chosen else {**options, **{name: value for option in chosen for name, value in option.items()}}


@st.composite
def arrivals(draw: st.DrawFn, drafters: Sequence[str]) -> list[Arrival]:
    found = []
    for _ in range(draw(st.integers(1, 8))):
        max_tokens = draw(st.integers(1, 24))
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=draw(st.sampled_from([0, 0, 3, max_tokens])),
            stop_token_ids=tuple(draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3))),
            ignore_eos=draw(st.booleans()),
            drafter=draw(st.sampled_from(drafters)),
            num_draft_tokens=draw(st.sampled_from([None, None, 0, 1, 5, 16])),
            **draw(sampling_options()),
        )
        cancelled = draw(st.one_of(st.none(), st.none(), st.integers(1, 20)))
        found.append(Arrival(draw(st.sampled_from([*PROMPTS, REPEATING])), params, draw(st.integers(0, 12)), cancelled))
    return found


def scripted(plain: Plain) -> dict[str, Drafter]:
    return {name: ScriptedDrafter(name, plain.continuation, plain.vocab_size) for name in ("wrong", "half", "oracle")}


def mtp(checkpoint: Path, width: int, top_k: int) -> MtpDrafter:
    decoder = Decoder(checkpoint, find_device(DEVICE))
    head = MtpHead(decoder, Checkpoint(checkpoint), VOCAB_SIZE)
    kv = allocate_kv_layer(decoder.config, 256, device=decoder.device)
    return MtpDrafter(LaunchedMtp(head, kv), kv, KV_BLOCK, width=width, top_k=top_k)


def decode(driver: EngineDriver, requests: Sequence[Arrival]) -> None:
    """Add and cancel the requests at their steps, and finish them."""
    step = 0
    while driver.engine.has_work() or any(arrival.step >= step for arrival in requests):
        for n, arrival in enumerate(requests):
            if arrival.step == step:
                driver.add(Request(request_id=str(n), prompt=Prompt(token_ids=arrival.prompt), params=arrival.params))
            if arrival.cancelled is not None and arrival.step + arrival.cancelled == step:
                driver.engine.cancel(str(n))
        driver.step()
        step += 1


def assert_plain(driver: EngineDriver, requests: Sequence[Arrival], plain: Plain) -> None:
    for n, arrival in enumerate(requests):
        result, reference = driver.results[str(n)], plain.run(arrival.prompt, arrival.params)
        if result.finish_reason == FinishReason.CANCELLED:
            assert arrival.cancelled is not None
            reference = beginning(reference, len(result.token_ids))
        else:
            assert result.finish_reason == reference.finish_reason
        assert num_different(result, reference) == 0


@given(
    requests=arrivals(DRAFTERS),
    router=st.sampled_from(["always", "always", "adaptive"]),
    max_prefill_rows=st.sampled_from([1, 7, 64]),
    joint_prefill_rows=st.sampled_from([1, 7, 64]),
    row_budget=st.sampled_from([2, 8, 32, 256]),
    max_draft_tokens=st.sampled_from([3, 16, 63]),
)
@FEW
def test_hybrid(
    hybrid: Path,
    small_draft_model: Path,
    plain: Plain,
    requests: list[Arrival],
    router: str,
    max_prefill_rows: int,
    joint_prefill_rows: int,
    row_budget: int,
    max_draft_tokens: int,
) -> None:
    config = engine_config(
        hybrid,
        drafters=("lookup", "mtp", "draft_model"),
        draft_model=small_draft_model,
        router=router,
        max_prefill_rows=max_prefill_rows,
        joint_prefill_rows=joint_prefill_rows,
        row_budget=row_budget,
        max_draft_tokens=max_draft_tokens,
        max_active=6,
    )
    extra: Mapping[str, Drafter] = {
        **scripted(plain),
        "mtp_tree": mtp(hybrid, 2, 3),
        "mtp_bush": mtp(hybrid, 4, 2),
    }
    driver = EngineDriver(config, extra, poison=True)
    decode(driver, requests)
    assert_plain(driver, requests, plain)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter_drafts_and_changes_nothing(
    hybrid: Path, small_draft_model: Path, plain: Plain, drafter: str
) -> None:
    config = engine_config(
        hybrid, drafters=("lookup", "mtp", "draft_model"), draft_model=small_draft_model, router="always", row_budget=64
    )
    extra = {**scripted(plain), "mtp_tree": mtp(hybrid, 2, 3), "mtp_bush": mtp(hybrid, 4, 2)}
    driver = EngineDriver(config, extra, poison=True)
    params = SamplingParams(max_tokens=40, ignore_eos=True, drafter=drafter)
    requests = [Arrival(prompt, params, n, None) for n, prompt in enumerate((PROMPTS[3], PROMPTS[7], REPEATING))]
    decode(driver, requests)
    assert_plain(driver, requests, plain)
    stats = [result.stats for result in driver.results.values() if result.stats is not None]
    assert sum(s.num_draft_tokens for s in stats) > 20
    if drafter == "oracle":
        assert all(s.num_accepted_tokens == s.num_draft_tokens for s in stats)
        assert all(s.num_rounds < 10 for s in stats)
    if drafter == "wrong":
        assert all(s.num_accepted_tokens == 0 for s in stats)
    if drafter == "half":
        assert all(0 < s.num_accepted_tokens < s.num_draft_tokens for s in stats)


def test_a_prefix_that_one_drafter_left_is_not_gone_on_from_by_another(hybrid: Path, plain: Plain) -> None:
    """Each has KV of its own under the same block ids; the other's was never written."""
    config = engine_config(hybrid, drafters=("mtp",), router="always")
    driver = EngineDriver(config, {"mtp_tree": mtp(hybrid, 2, 3)}, poison=True)
    for drafter in ("mtp", "mtp_tree", "mtp"):
        params = SamplingParams(max_tokens=12, ignore_eos=True, drafter=drafter)
        requests = [Arrival(PROMPTS[-1], params, 0, None)]
        driver.results.clear()
        decode(driver, requests)
        assert_plain(driver, requests, plain)
    assert not driver.engine.rounds.drafting.failed


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen3_next"])
def other_family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plain]:
    checkpoint = tiny_checkpoint(tmp_path_factory.mktemp(request.param), request.param, seed=3)
    return checkpoint, Plain(checkpoint)


@given(
    requests=arrivals(["wrong", "half", "oracle", "lookup", "half+lookup"]),
    chunk=st.sampled_from([1, 7, 64]),
    row_budget=st.sampled_from([8, 64]),
)
@settings(FEW, max_examples=5)
def test_other_families(other_family: tuple[Path, Plain], requests: list[Arrival], chunk: int, row_budget: int) -> None:
    checkpoint, plain = other_family
    config = engine_config(
        checkpoint,
        drafters=("lookup",),
        router="always",
        row_budget=row_budget,
        max_prefill_rows=chunk,
        joint_prefill_rows=chunk,
    )
    driver = EngineDriver(config, scripted(plain), poison=True)
    decode(driver, requests)
    assert_plain(driver, requests, plain)


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_a_limit_inside_an_accepted_run(hybrid: Path, plain: Plain, max_tokens: int) -> None:
    """The next turn goes on from the tokens that were given out, not from those that were accepted."""
    driver = EngineDriver(engine_config(hybrid, router="always"), scripted(plain), poison=True)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, drafter="oracle")
    first = Request(
        request_id="1", prompt=Prompt(token_ids=PROMPTS[3]), params=params, sequence_id=1, sequence_start=True
    )
    result = driver.run(first)
    assert num_different(result, plain.run(PROMPTS[3], params)) == 0
    second = driver.run(Request(request_id="2", prompt=Prompt(token_ids=(5, 6)), params=params, sequence_id=1))
    assert num_different(second, plain.run((*PROMPTS[3], *result.token_ids, 5, 6), params)) == 0


@pytest.mark.parametrize("at", range(2, 9))
def test_a_stop_token_inside_an_accepted_run(hybrid: Path, plain: Plain, at: int) -> None:
    stop_id = plain.continuation(PROMPTS[4])[at]
    driver = EngineDriver(engine_config(hybrid, router="always"), scripted(plain), poison=True)
    params = SamplingParams(max_tokens=40, ignore_eos=True, drafter="oracle", stop_token_ids=(stop_id,))
    first = Request(
        request_id="1", prompt=Prompt(token_ids=PROMPTS[4]), params=params, sequence_id=1, sequence_start=True
    )
    result = driver.run(first)
    assert result.finish_reason == FinishReason.STOP
    assert result.token_ids[-1] == stop_id
    assert num_different(result, plain.run(PROMPTS[4], params)) == 0
    second = driver.run(Request(request_id="2", prompt=Prompt(token_ids=(5, 6)), params=params, sequence_id=1))
    assert num_different(second, plain.run((*PROMPTS[4], *result.token_ids, 5, 6), params)) == 0


@given(
    text=st.text(st.characters(codec="ascii", min_codepoint=32), min_size=1, max_size=40),
    at=st.integers(0, 30),
    length=st.integers(1, 3),
    drafter=st.sampled_from(["half", "oracle", "lookup", "mtp", "half+mtp+lookup"]),
    min_tokens=st.sampled_from([0, 0, 8]),
    include_stop=st.booleans(),
)
@settings(FEW, max_examples=15)
def test_stop_strings(
    text_model: Path,
    plain_text: Plain,
    text: str,
    at: int,
    length: int,
    drafter: str,
    min_tokens: int,
    include_stop: bool,
) -> None:
    prompt = plain_text.encode(text)
    whole = plain_text.run(prompt, SamplingParams(max_tokens=40, ignore_eos=True)).text
    at = min(at, len(whole) - length)
    params = SamplingParams(
        max_tokens=40,
        ignore_eos=True,
        stop=(whole[at : at + length], "not in there"),
        min_tokens=min_tokens,
        include_stop=include_stop,
        drafter=drafter,
    )
    config = engine_config(text_model, drafters=("lookup", "mtp"), router="always")
    driver = EngineDriver(config, scripted(plain_text), poison=True)
    result = driver.run(Request(request_id="1", prompt=Prompt(text=text), params=params))
    reference = plain_text.run(prompt, params)
    assert num_different(result, reference) == 0
    assert (result.text, result.finish_reason) == (reference.text, reference.finish_reason)
    if min_tokens == 0:
        assert result.finish_reason == FinishReason.STOP
        cut = whole.index(params.stop[0])
        assert result.text == whole[: cut + length if include_stop else cut]


@pytest.mark.parametrize("drafter", ["half", "mtp+lookup"])
def test_bundled_model(bundled: Path, drafter: str) -> None:
    plain = Plain(bundled, kv_cache_bytes=64 << 20, num_threads=0)
    prompts = [plain.encode("def read(path):"), plain.encode("os.path.join joins")]
    params = SamplingParams(max_tokens=20, ignore_eos=True, drafter=drafter)
    config = engine_config(bundled, drafters=("lookup", "mtp"), router="always", kv_cache_bytes=64 << 20, num_threads=0)
    driver = EngineDriver(config, scripted(plain))
    requests = [Arrival(prompt, params, n, None) for n, prompt in enumerate(prompts)]
    decode(driver, requests)
    assert_plain(driver, requests, plain)
