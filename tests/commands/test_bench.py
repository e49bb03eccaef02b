# SPDX-License-Identifier: Apache-2.0
"""`tandem bench` on a tiny checkpoint: what it reports and what it refuses. Nothing here depends on how fast it is."""

import json
import math
import runpy
from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from fakes.tiny_model import edit_config, tiny_checkpoint
from tandem_backend.benchmarks.engine_runs import Run, bench_config, run_in_turns, run_together
from tandem_backend.benchmarks.passes import bushy_tree
from tandem_backend.benchmarks.verify_curve import ROWS
from tandem_backend.commands.bench import bench
from tandem_backend.engine import Engine
from tandem_backend.engine import round as rounds
from tandem_backend.engine.draft_tree import Accepted, DraftTree, accept
from tandem_backend.engine.router import load_verify_curve
from tandem_backend.engine.scheduler import Scheduler
from tandem_backend.types import Prompt, Request, SamplingParams

OPS_SCRIPT = Path(__file__).parents[2] / "kernels" / "bench" / "ops.py"

# Repetitions, so that lookup finds something to propose. Fewer prompts than joint sequences.
PROMPTS = [
    {"id": "short", "kind": "code", "input_ids": [5, 6, 7] * 3},
    {"id": "long", "kind": "prose", "input_ids": [11, 12, 13, 14] * 6},
    {"id": "odd", "input_ids": [20, 21, 22, 23, 20, 21, 22]},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("hybrid"), "qwen3_5_text", mtp=True)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f"{json.dumps(prompt)}\n" for prompt in PROMPTS), encoding="utf-8")
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(bench, [str(argument) for argument in arguments])


def run_decode(checkpoint: Path, prompts: Path, *arguments: object) -> Result:
    return run("decode", "--checkpoint", checkpoint, "--prompts", prompts, "--max-tokens", 16, *arguments)


def last_line(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    values: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return values


def assert_positive(*figures: float) -> None:
    assert all(math.isfinite(figure) and figure > 0 for figure in figures), figures


def test_plain_reports_both_sides(checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    file = tmp_path / "plain.json"
    result = run(
        *("plain", "--checkpoint", checkpoint, "--prompts", prompts),
        *("--max-tokens", 8, "--repeats", 1, "--json", file),
    )
    values = last_line(result)
    assert json.loads(file.read_text(encoding="utf-8")) == values
    assert list(values["decode_tokens_per_s"]) == ["1", "4", "8", "16", "32"]
    assert list(values["pass_ms"]) == ["1", "8"]
    assert_positive(*values["decode_tokens_per_s"].values(), *values["pass_ms"].values(), values["prefill_ratio"])
    ours, theirs = values["decode_tokens_per_s"]["1"], values["transformers_decode_tokens_per_s"]
    assert values["decode_ratio"] == pytest.approx(ours / theirs, rel=1e-3)
    assert values["machine"]["threads"] > 0
    assert values["commit"]
    assert "transformers" in result.stdout
    assert "repeat 1 of 1" in result.stderr


def test_decode_reports_prompts_kinds_parts_and_joint_rounds(checkpoint: Path, prompts: Path) -> None:
    values = last_line(run_decode(checkpoint, prompts, "--repeats", 2))
    assert [prompt["id"] for prompt in values["prompts"]] == ["short", "long", "odd"]
    assert [(kind["kind"], kind["num_prompts"]) for kind in values["kinds"]] == [
        ("code", 1),
        ("prose", 1),
        ("prompts", 1),
        ("all", 3),
    ]
    for prompt in values["prompts"]:
        assert prompt["num_tokens"] == 16
        assert_positive(prompt["plain_tokens_per_s"], prompt["speculative_tokens_per_s"], prompt["speedup"])
    assert values["rounds"]["plain"]["acceptance_len"] == 1.0
    assert values["rounds"]["plain"]["rows"] == 1.0
    assert values["rounds"]["speculative"]["rows"] > 1.0  # something was drafted
    for spent in values["rounds"].values():
        parts = sum(spent[f"{part}_ms"] for part in ("draft", "verify", "accept", "commit", "host"))
        assert spent["round_ms"] == pytest.approx(parts, abs=1e-3)
    assert values["joint"]["num_sequences"] == 4
    assert_positive(values["joint"]["one_tokens_per_s"], values["joint"]["joint_tokens_per_s"])


def test_a_text_that_speculation_changed_ends_the_run(
    checkpoint: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def accept_blindly(tree: DraftTree, choices: Sequence[int]) -> Accepted:
        if tree.num_nodes == 1:
            return accept(tree, choices)
        return Accepted([0, 1], [tree.token_ids[1], choices[1]])

    monkeypatch.setattr(rounds, "accept", accept_blindly)
    result = run_decode(checkpoint, prompts, "--drafters", "lookup", "--repeats", 1)
    assert result.exit_code == 1
    assert "with lookup, 1 in parallel the text differs from plain decoding's at output token" in result.stderr
    assert result.stdout == ""


def test_a_text_that_joint_rounds_changed_ends_the_run(
    checkpoint: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = rounds.choose

    def choose_wrongly_together(logits: torch.Tensor, scheduled: Sequence[Any], *others: Any) -> Any:
        return sound(-logits if len(scheduled) > 1 else logits, scheduled, *others)

    monkeypatch.setattr(rounds, "choose", choose_wrongly_together)
    result = run_decode(checkpoint, prompts, "--repeats", 1)
    assert result.exit_code == 1
    assert "4 in parallel the text differs" in result.stderr


def test_texts_too_short_to_measure_are_refused(prompts: Path, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "silent", "qwen3_5_text", mtp=True)
    edit_config(checkpoint, eos_token_id=list(range(151)))
    result = run_decode(checkpoint, prompts)
    assert result.exit_code == 1
    assert "no text has 8 tokens" in result.stderr


def test_a_drafter_that_the_checkpoint_lacks_is_refused(prompts: Path, tmp_path: Path) -> None:
    result = run_decode(tiny_checkpoint(tmp_path / "plain", "qwen3"), prompts, "--drafters", "mtp")
    assert result.exit_code == 1
    assert "mtp" in result.stderr


def test_the_verify_curve_is_what_the_router_reads(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "curve.json"
    values = last_line(run("verify-curve", "--checkpoint", checkpoint, "--repeats", 2, "--out", file))
    curve = load_verify_curve(file)
    assert curve.rows == ROWS
    assert list(curve.milliseconds) == [row["milliseconds"] for row in values["rows"]]
    assert all(a <= b for a, b in pairwise(curve.milliseconds))
    assert Engine(bench_config(checkpoint, ("lookup",), 1, 1).model_copy(update={"verify_curve": file}))


@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 64])
def test_bushy_trees_are_in_pre_order_and_branch(num_rows: int) -> None:
    parents = bushy_tree(num_rows)
    assert len(parents) == num_rows
    assert parents[0] == -1
    path = [0]
    for node in range(1, num_rows):
        while path[-1] != parents[node]:
            path.pop()  # IndexError: the parent's subtree is over
        path.append(node)
    assert max((parents.count(node) for node in range(num_rows)), default=0) == min(num_rows - 1, 2)


def test_only_rounds_in_which_all_decode_are_timed(checkpoint: Path) -> None:
    engine = Engine(bench_config(checkpoint, (), 1, 2))
    requests = [
        Request(
            request_id=str(n),
            prompt=Prompt(token_ids=(5, 6, 7)),
            params=SamplingParams(max_tokens=n, ignore_eos=True),
        )
        for n in (4, 9)
    ]
    measured = run_together(engine, [engine.prepare(request) for request in requests])
    assert [len(ids) for ids in measured.token_ids] == [4, 9]
    assert measured.times.num_rounds == 3  # after the round of the first tokens, up to the shorter one's end
    assert measured.num_tokens == 6
    assert list(measured.tokens_by_id.items()) == [("4", 3), ("9", 3)]
    assert [tokens for tokens, _ in measured.progress] == [2, 4, 6]
    assert measured.times.num_rows == 6


def test_the_beginning_of_a_run_has_its_share_of_the_time() -> None:
    run = Run([], progress=[(2, 1.0), (3, 1.5), (7, 3.5)])
    assert [run.first_tokens(count).decode_s for count in (1, 2, 3, 4, 7)] == [0.5, 1.0, 1.5, 2.0, 3.5]
    assert run.first_tokens(4).tokens_per_s == 2.0
    with pytest.raises(ValueError, match="count: the run has 7 tokens, not 8"):
        run.first_tokens(8)


def test_requests_in_turns_share_no_round_and_stay_near_each_other(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(bench_config(checkpoint, (), 1, 2))
    decoding, schedule = [], Scheduler.schedule

    def watched(scheduler: Scheduler) -> Any:
        scheduled = schedule(scheduler)
        decoding.append([rows.generation.request.request_id for rows in scheduled if not rows.num_prompt_rows])
        return scheduled

    monkeypatch.setattr(Scheduler, "schedule", watched)
    requests = [
        Request(request_id=name, prompt=Prompt(token_ids=(5, 6, 7)), params=SamplingParams(max_tokens=n))
        for name, n in (("a", 20), ("b", 30))
    ]
    one, other = run_in_turns(engine, [engine.prepare(request) for request in requests])
    assert [len(run.token_ids[0]) for run in (one, other)] == [20, 30]
    assert one.token_ids[0] == other.token_ids[0][:20]
    assert [run.num_tokens for run in (one, other)] == [run.times.num_rounds for run in (one, other)] == [19, 29]
    turns = [(name, len(list(rounds_of))) for (name,), rounds_of in groupby(filter(None, decoding))]
    assert turns == [("a", 8), ("b", 16), ("a", 11), ("b", 13)]


def test_ops_are_timed_at_every_row_count() -> None:
    script = runpy.run_path(str(OPS_SCRIPT))
    figures = script["measure"](script["all_ops"](), 1)
    assert len(figures) == 5
    for by_rows in figures.values():
        assert list(by_rows) == [1, 2, 4, 8, 16, 32, 64]
        assert_positive(*by_rows.values())


def test_an_op_whose_bits_depend_on_the_rows_is_not_timed() -> None:
    script = runpy.run_path(str(OPS_SCRIPT))
    sound = script["all_ops"]()[0]

    def nudged(num_rows: int) -> torch.Tensor:
        out = sound.run(num_rows).clone()
        if num_rows >= 8:
            out[5, 0] = torch.nextafter(out[5, 0], torch.tensor(torch.inf))
        return out

    with pytest.raises(ValueError, match="row 5 of 8 has other bits than alone; not timed"):
        script["measure"]([script["Op"]("nudged", nudged, sound.walk)], 1)


def test_resume_asks_cold_and_resumed(checkpoint: Path, tmp_path: Path) -> None:
    result = run(
        *("resume", "--checkpoint", checkpoint, "--tokens", 64, "--tokens", 700, "--json", tmp_path / "out.json")
    )
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out.json").read_text())
    # 700 is more than the checkpoint's context, and a prompt that was asked is known but for nothing.
    assert [(line["tokens"], line["cached_tokens"]) for line in report["lengths"]] == [(64, 64), (700, 700)]
    assert all(
        line["cold_ms"] > 0 and line["resumed_ms"] > 0 and line["from_disk_ms"] > 0 for line in report["lengths"]
    )
    assert "speed-up" in result.stdout


def test_structured_holds_texts_with_a_schema_to_plain_decoding() -> None:
    """On the bundled checkpoint: a tiny one has no words for JSON."""
    bundled = Path(__file__).parents[2] / "model_repository" / "tandem" / "1" / "tandem-pydoc"
    result = last_line(run("structured", "--checkpoint", bundled, "--max-tokens", 8, "--repeats", 1))
    assert [row["side"] for row in result["rows"]] == [
        "free text, none",
        "free text, lookup+mtp",
        "schema, none",
        "schema, lookup+mtp",
        "schema, forced",
    ]
    plain, drafted, forced = result["rows"][2:]
    assert plain["num_tokens"] == drafted["num_tokens"] == forced["num_tokens"]
    assert plain["tokens_per_round"] == 1 < forced["tokens_per_round"]
    assert result["schema_over_free_plain"] > 0


def test_no_figure_is_better_because_a_prompt_was_asked_before(checkpoint: Path) -> None:
    config = bench_config(checkpoint, (), num_threads=1, max_active=1)
    assert (config.prefix_cache_bytes, config.response_cache_bytes) == (0, 0)
