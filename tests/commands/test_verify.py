# SPDX-License-Identifier: Apache-2.0
"""`tandem verify` in this process: it passes an exact engine and catches ones that were broken on purpose."""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tandem_kernels as kernels
import torch
from click.testing import CliRunner, Result
from fakes.tiny_model import tiny_checkpoint
from tandem_backend.commands.verify import verify
from tandem_backend.engine.drafters.base import Proposal
from tandem_backend.engine.drafters.lookup import LookupDrafter
from tandem_backend.engine.sequence import Generation
from tandem_backend.model.batch import RowBatch
from tandem_backend.model.decoder import Decoder, ForwardResult
from tandem_backend.model.state import ModelState, SlotState
from tandem_backend.types import SamplingParams
from tandem_backend.verification import run as gate_run
from tandem_backend.verification.sampling import KINDS

BUNDLED = Path(__file__).parents[2] / "model_repository" / "tandem" / "1" / "tandem-pydoc"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

# Repetitions, so that lookup finds something to propose.
PROMPTS = {"short": [5, 6, 7] * 3, "long": [11, 12, 13, 14] * 6, "odd": [20, 21, 22, 23, 20, 21, 22]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("hybrid"), "qwen3_5_text", mtp=True)


@pytest.fixture(scope="module")
def speaking_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the bundled tokenizer and chat template: a record's requests are text."""
    directory = tiny_checkpoint(tmp_path_factory.mktemp("speaking"), "qwen3_5_text", mtp=True, vocab_size=8192)
    for name in TOKENIZER_FILES:
        shutil.copy(BUNDLED / name, directory)
    return directory


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path, [{"id": name, "input_ids": ids, "kind": "ids"} for name, ids in PROMPTS.items()])


def write_prompts(folder: Path, lines: list[Any]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(verify, [str(argument) for argument in arguments])


def run_gate(checkpoint: Path, prompts: Path, *arguments: object) -> Result:
    return run("--checkpoint", checkpoint, "--prompts", prompts, "--max-tokens", 12, *arguments)


def break_forward(
    monkeypatch: pytest.MonkeyPatch, damage: Callable[[torch.Tensor], object], *, min_rows: int = 2
) -> None:
    """Let `damage` change the logits of passes over `min_rows` rows or more; 2: as a tile-dependent kernel would."""
    whole = Decoder.forward

    def forward(self: Decoder, batch: RowBatch, *rest: Any) -> ForwardResult:
        result = whole(self, batch, *rest)
        if batch.num_rows >= min_rows and len(result.logits):
            damage(result.logits)
        return result

    monkeypatch.setattr(Decoder, "forward", forward)


def flip_lowest_bit(logits: torch.Tensor) -> None:
    logits.view(torch.int32)[-1, 3] ^= 1


def prefer_another_token(logits: torch.Tensor) -> None:
    logits[-1, 3] += 100.0


def test_an_exact_engine_passes_under_every_combination(checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    result = run_gate(checkpoint, prompts, "--parallel", "1,4", "--chunks", "1,5", "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "out.json").read_text())
    lines = written["combinations"]
    assert [line["drafters"] for line in lines[:6]] == ["wrong", "half", "oracle", "lookup", "mtp", "mtp+lookup"]
    assert {(line["parallel"], line["chunk"], line["cache"]) for line in lines} == {
        (parallel, chunk, "cold") for parallel in (1, 4) for chunk in (1, 5)
    }
    assert len(lines) == written["totals"]["num_combinations"] == 24
    assert written["first_difference"] is None
    assert all(line["num_differing_tokens"] == line["num_differing_rows"] == 0 for line in lines)
    assert all(line["num_draft_rows"] > 0 and line["num_tokens"] > 0 for line in lines)
    # Fewer prompts than parallel requests are repeated.
    assert {line["num_prompts"] for line in lines if line["parallel"] == 4} == {4}
    by_drafter = {line["drafters"]: line["acceptance_len"] for line in lines}
    assert by_drafter["wrong"] == 1.0
    assert by_drafter["oracle"] > by_drafter["half"] > 1.0
    table = result.stdout.splitlines()
    assert table[0].split()[:4] == ["drafters", "parallel", "chunk", "cache"]
    assert table[1].split()[:6] == ["wrong", "1", "1", "cold", "3", str(lines[0]["num_tokens"])]
    assert table[-1] == "24 combinations, 0 different, 0 without drafts"
    assert "plain decoding: 3 prompts" in result.stderr


ALL_KINDS = "greedy,seeded,penalties,grammar,logprobs,stops"


def run_kinds(checkpoint: Path, prompts: Path, kinds: str, drafters: str) -> Result:
    options = ("--sampling", kinds, "--drafters", drafters, "--parallel", "1,4", "--chunks", "7")
    return run_gate(checkpoint, prompts, *options)


def test_every_kind_of_sampling_passes_under_an_exact_engine(speaking_checkpoint: Path, prompts: Path) -> None:
    result = run_kinds(speaking_checkpoint, prompts, ALL_KINDS, "half,oracle,mtp")
    assert result.exit_code == 0, result.output
    table = [line.split() for line in result.stdout.splitlines()[1:-1]]
    assert {line[4] for line in table} == {"18"}
    assert all(float(line[8]) > 1.5 for line in table if line[0] == "oracle")  # it knows each kind's own answer


def test_noise_that_depends_on_the_number_of_draws_is_found(
    checkpoint: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws, original = itertools.count(), kernels.gumbel_argmax

    def by_count(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, stream: int = 0) -> torch.Tensor:
        counted = torch.tensor([next(draws) for _ in positions], dtype=torch.int32)
        return original(logits, seeds, counted, stream)

    monkeypatch.setattr(kernels, "gumbel_argmax", by_count)
    assert run_kinds(checkpoint, prompts, "seeded", "half").exit_code == 1


def test_logprobs_of_the_wrong_row_are_found(checkpoint: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = kernels.log_probs

    def of_the_row_before(logits: torch.Tensor, ids: torch.Tensor, num_top: int = 0) -> tuple[torch.Tensor, ...]:
        return tuple(values.roll(1, 0) for values in original(logits, ids, num_top))

    monkeypatch.setattr(kernels, "log_probs", of_the_row_before)
    assert run_kinds(checkpoint, prompts, "logprobs", "oracle").exit_code == 1


def test_a_stop_string_that_is_missed_inside_a_run_is_found(
    speaking_checkpoint: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking for it once a round, at the end, lets text through that plain decoding cuts."""
    take = Generation.take

    def look_at_the_end_only(self: Generation, token_ids: list[int]) -> Any:
        whole = self.text
        assert whole is not None
        stop, whole._stop = whole._stop, () if len(token_ids) > 1 else whole._stop
        result = take(self, token_ids)
        whole._stop = stop
        return result

    monkeypatch.setitem(KINDS, "stops", SamplingParams(stop=tuple("aeiou")))
    assert run_kinds(speaking_checkpoint, prompts, "stops", "oracle").exit_code == 0
    monkeypatch.setattr(Generation, "take", look_at_the_end_only)
    assert run_kinds(speaking_checkpoint, prompts, "stops", "oracle").exit_code == 1


def test_one_flipped_bit_is_a_difference_though_no_token_changes(
    checkpoint: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_forward(monkeypatch, flip_lowest_bit)
    options = ("--drafters", "none", "--parallel", "1,2", "--chunks", "1", "--json", tmp_path / "out.json")
    result = run_gate(checkpoint, prompts, *options)
    assert result.exit_code == 1
    alone, together = json.loads((tmp_path / "out.json").read_text())["combinations"]
    assert alone["num_differing_rows"] == 0  # one row a pass is never broken
    assert together["num_differing_tokens"] == 0
    assert together["num_differing_rows"] > 0
    assert result.stdout.count("first difference") == 1
    assert (
        "first difference: drafters=none parallel=2 chunk=1 cache=cold: prompt 'short', output token" in result.stdout
    )
    assert "1 of 151 logits differ, the first at token id 3: plain" in result.stdout
    plain, here = (line for line in result.stdout.splitlines() if line.startswith(("  plain:", "  here:")))
    assert plain.split("top logits")[0].split()[-2:] == here.split("top logits")[0].split()[-2:]
    assert result.stdout.splitlines()[-1] == "2 combinations, 1 different, 0 without drafts"


def test_another_token_is_a_difference(checkpoint: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_forward(monkeypatch, prefer_another_token)
    result = run_gate(checkpoint, prompts, "--drafters", "none", "--parallel", "1", "--chunks", "16")
    assert result.exit_code == 1
    _, line, first, plain, here, *_ = result.stdout.splitlines()
    assert int(line.split()[6]) > 0  # differing tokens
    assert "prompt 'short', output token 0" in first
    assert " token 3," in here
    assert " token 3," not in plain


def test_a_drafted_row_that_is_wrong_is_found(checkpoint: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commit forgets to drop the rejected rows: the state holds tokens that are not in the text."""
    whole = Decoder.commit

    def commit(self: Decoder, result: ForwardResult, batch: RowBatch, paths: Any, *rest: Any) -> Any:
        trees = [len(rows.token_ids) if rows.parents is not None else 0 for rows in batch.sequences]
        kept = [[*path, n - 1] if path and len(path) < n else path for path, n in zip(paths, trees, strict=True)]
        return whole(self, result, batch, kept, *rest)

    monkeypatch.setattr(Decoder, "commit", commit)
    result = run_gate(checkpoint, prompts, "--drafters", "none,wrong", "--parallel", "1", "--chunks", "4")
    assert result.exit_code == 1
    assert "2 combinations, 1 different" in result.stdout
    assert "first difference: drafters=wrong" in result.stdout


def test_plain_decoding_that_does_not_repeat_itself_is_told(
    checkpoint: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = itertools.count()
    break_forward(monkeypatch, lambda logits: logits[:, 5].fill_(-float(next(passes))), min_rows=1)
    result = run_gate(checkpoint, prompts, "--drafters", "none", "--parallel", "1", "--chunks", "1")
    assert result.exit_code == 1
    assert "plain decoding does not repeat itself" in result.stderr


def test_drafters_that_never_draft_fail(checkpoint: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LookupDrafter, "propose", lambda self, contexts: [Proposal() for _ in contexts])
    result = run_gate(checkpoint, prompts, "--drafters", "lookup", "--parallel", "1", "--chunks", "4")
    assert result.exit_code == 1
    assert "never drafted: drafters=lookup parallel=1 chunk=4" in result.stderr
    assert result.stdout.splitlines()[-1] == "1 combinations, 0 different, 1 without drafts"


def test_a_failed_round_ends_the_gate(checkpoint: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(logits: torch.Tensor) -> None:
        raise RuntimeError("no memory")

    break_forward(monkeypatch, fail)
    result = run_gate(checkpoint, prompts, "--drafters", "half", "--parallel", "1", "--chunks", "1")
    assert result.exit_code == 1
    assert "the round failed: no memory" in result.stderr


def test_rows_that_are_not_recorded_are_no_equal_rows(
    checkpoint: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem_backend.engine.round.RoundRunner._record", lambda *arguments: None)
    result = run_gate(checkpoint, prompts, "--drafters", "half", "--parallel", "1", "--chunks", "1")
    assert result.exit_code == 1
    assert "0 rows recorded" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--chunks", "1,0"], "--chunks"),
        (["--chunks", "7,,64"], "--chunks"),
        (["--chunks", "many"], "--chunks"),
        (["--parallel", "-1"], "--parallel"),
        (["--parallel", ""], "--parallel"),
        (["--drafters", ""], "--drafters"),
        (["--drafters", "oracle,clairvoyant"], "unknown drafter 'clairvoyant'; known: none, wrong, half, oracle"),
        (["--drafters", "mtp+clairvoyant"], "unknown drafter 'clairvoyant'"),
        (["--cache", "tepid"], "--cache"),
        (["--cache", "cold,disc"], "--cache"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--json", "no/such/folder/out.json"], "--json"),
        (["--server", "127.0.0.1:1"], "give one of --checkpoint and --server"),
        (["--record", "record.json"], "give one of --prompts, --record and --against"),
    ],
)
def test_a_wrong_option_is_named(checkpoint: Path, prompts: Path, arguments: list[str], message: str) -> None:
    result = run_gate(checkpoint, prompts, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--server", "nonsense", "--prompts", "P"], "--server: must be host:port"),
        (["--server", "127.0.0.1:1", "--prompts", "P", "--chunks", "7"], "--chunks"),
        (["--server", "127.0.0.1:1", "--prompts", "P", "--drafters", "oracle"], "oracle is a test drafter"),
        (["--server", "127.0.0.1:1", "--record", "record.json"], "--record needs --checkpoint"),
        (["--prompts", "P"], "give one of --checkpoint and --server"),
        ([], "give one of --prompts, --record and --against"),
    ],
)
def test_a_wrong_option_for_a_server_is_named(prompts: Path, arguments: list[str], message: str) -> None:
    result = run(*(prompts if argument == "P" else argument for argument in arguments))
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_checkpoint_without_a_head_has_no_mtp(prompts: Path, tmp_path: Path) -> None:
    plain = tiny_checkpoint(tmp_path / "llama", "llama")
    result = run_gate(plain, prompts, "--drafters", "lookup,mtp")
    assert result.exit_code == 2
    assert "mtp needs a head" in result.stderr
    result = run_gate(plain, prompts, "--parallel", "1", "--chunks", "8")
    assert result.exit_code == 0, result.output
    assert "mtp" not in result.stdout


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"id": "a"}, "prompts.jsonl:2: needs exactly one of prompt, messages, input_ids, has none"),
        ({"id": "a", "prompt": "x", "input_ids": [1]}, "has prompt and input_ids"),
        ({"prompt": "x"}, "prompts.jsonl:2: id: Field required"),
        ({"id": "a", "prompt": 7}, "prompts.jsonl:2: prompt: Input should be a valid string"),
        ({"id": "a", "prompt": "x", "tools": [{}]}, "tools: only allowed with messages"),
        ({"id": "first", "input_ids": [4]}, "id 'first' stands more than once"),
        ("{", "prompts.jsonl:2: not valid JSON"),
        ([1, 2], "prompts.jsonl:2"),
    ],
)
def test_a_wrong_line_of_prompts_is_named(checkpoint: Path, tmp_path: Path, line: Any, message: str) -> None:
    result = run_gate(checkpoint, write_prompts(tmp_path, [{"id": "first", "input_ids": [3]}, line]))
    assert result.exit_code == 2
    assert "--prompts" in result.stderr
    assert message in " ".join(result.stderr.split())


def test_a_file_without_prompts_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    assert "holds no prompt" in run_gate(checkpoint, write_prompts(tmp_path, [""])).stderr


def test_a_prompt_that_the_engine_refuses_is_named(checkpoint: Path, tmp_path: Path) -> None:
    result = run_gate(checkpoint, write_prompts(tmp_path, [{"id": "huge", "input_ids": [3] * 600}]))
    assert result.exit_code == 1
    assert "prompt 'huge': input_ids: the prompt has 600 tokens" in result.stderr


@pytest.fixture(scope="module")
def record(speaking_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("record") / "release.json"
    result = run("--checkpoint", speaking_checkpoint, "--record", path)
    assert result.exit_code == 0, result.output
    assert "13 requests" in result.stdout
    return path


def edited(record: Path, folder: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    content = json.loads(record.read_text())
    edit(content)
    path = folder / "edited.json"
    path.write_text(json.dumps(content))
    return path


def test_the_same_build_answers_as_recorded(speaking_checkpoint: Path, record: Path) -> None:
    result = run("--checkpoint", speaking_checkpoint, "--against", record)
    assert result.exit_code == 0, result.output
    assert "13 requests answered as in" in result.stdout
    assert "note" not in result.stdout


def test_a_record_covers_the_ways_to_ask(record: Path) -> None:
    requests = [entry["request"] for entry in json.loads(record.read_text())["entries"]]
    assert len({request["name"] for request in requests}) == 13
    for key in ("prompt", "messages", "tools", "enable_thinking", "stop", "min_tokens", "stream"):
        assert any(key in request for request in requests)
    streamed, whole = (entry["answer"] for entry in json.loads(record.read_text())["entries"][:2])
    assert streamed == whole
    assert len(streamed["logprobs"]) == len(streamed["token_ids"])


def _change_bit(content: dict[str, Any]) -> None:
    logprobs = content["entries"][6]["answer"]["logprobs"]
    logprobs[2] = f"{int(logprobs[2], 16) ^ 1:08x}"


def _change_token(content: dict[str, Any]) -> None:
    content["entries"][0]["answer"]["token_ids"][1] ^= 1


def _drop_last(content: dict[str, Any]) -> None:
    for values in ("token_ids", "logprobs"):
        content["entries"][3]["answer"][values].pop()


def _change_text(content: dict[str, Any]) -> None:
    content["entries"][5]["answer"]["text"] += "!"


def _change_reason(content: dict[str, Any]) -> None:
    content["entries"][5]["answer"]["finish_reason"] = "cancelled"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_change_bit, "request 'chat-streamed': output token 2: recorded token"),
        (_change_token, "request 'prose-streamed': output token 1: recorded token"),
        (_drop_last, "request 'one-token': output token 0: recorded the end, now token"),
        (_change_text, "request 'unicode-whole': text: recorded"),
        (_change_reason, "request 'unicode-whole': finish_reason: recorded 'cancelled', now"),
    ],
)
def test_any_other_answer_is_found(
    speaking_checkpoint: Path, record: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], None], message: str
) -> None:
    result = run("--checkpoint", speaking_checkpoint, "--against", edited(record, tmp_path, edit))
    assert result.exit_code == 1
    assert message in result.stdout


def test_a_build_with_other_bits_is_caught(
    speaking_checkpoint: Path, record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_forward(monkeypatch, lambda logits: logits.mul_(1.0 + 2.0**-22), min_rows=1)
    result = run("--checkpoint", speaking_checkpoint, "--against", record)
    assert result.exit_code == 1
    assert "different from" in result.stdout


@pytest.mark.parametrize(
    ("field", "value", "note"),
    [
        ("kernels", "0" * 64, "note: the kernels differ from the record's"),
        (
            "device",
            "cuda H200",
            "note: the device differs from the record's, for which the promise does not hold (cuda",
        ),
        ("versions", {"torch": "1.0"}, "note: the versions of packages differ"),
        ("arithmetic", {"kv_block": 32}, "note: the arithmetic settings differ"),
    ],
)
def test_another_build_or_device_is_said_and_compared(
    speaking_checkpoint: Path, record: Path, tmp_path: Path, field: str, value: Any, note: str
) -> None:
    path = edited(record, tmp_path, lambda content: content["fingerprint"].update({field: value}))
    result = run("--checkpoint", speaking_checkpoint, "--against", path)
    assert result.exit_code == 0, result.output
    assert note in result.stdout


@pytest.mark.parametrize("field", ["weights", "tokenizer"])
def test_other_weights_are_not_compared(speaking_checkpoint: Path, record: Path, tmp_path: Path, field: str) -> None:
    path = edited(record, tmp_path, lambda content: content["fingerprint"].update({field: "0" * 64}))
    result = run("--checkpoint", speaking_checkpoint, "--against", path)
    assert result.exit_code == 1
    assert f"the checkpoint has {'other weights' if field == 'weights' else 'another tokenizer'}" in result.stderr
    assert "answers can't be compared" in result.stderr


def test_a_file_that_is_no_record_is_refused(speaking_checkpoint: Path, record: Path, tmp_path: Path) -> None:
    path = edited(record, tmp_path, lambda content: content["entries"][0]["answer"].pop("logprobs"))
    result = run("--checkpoint", speaking_checkpoint, "--against", path)
    assert result.exit_code == 1
    assert "not a record: entries.0.answer.logprobs: Field required" in result.stderr


def test_a_checkpoint_without_a_tokenizer_has_no_record(checkpoint: Path, tmp_path: Path) -> None:
    result = run("--checkpoint", checkpoint, "--record", tmp_path / "record.json")
    assert result.exit_code == 1
    assert "the checkpoint has no tokenizer" in result.stderr


CACHES = ("--drafters", "none,lookup", "--parallel", "2", "--chunks", "7", "--cache", "warm,session,disk")


def test_what_caches_serve_is_plain_decoding(checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    result = run_gate(checkpoint, prompts, *CACHES, "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    lines = json.loads((tmp_path / "out.json").read_text())["combinations"]
    assert [line["cache"] for line in lines] == ["warm"] * 2 + ["session"] * 2 + ["disk"] * 2
    assert all(line["num_cached_tokens"] > 0 for line in lines)
    assert lines[2]["num_prompts"] == 4 * lines[0]["num_prompts"]


def test_a_state_restored_wrongly_is_found(checkpoint: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def restore_slot(self: ModelState, slot: int, saved: SlotState) -> None:
        """The recurrent state is left behind."""

    monkeypatch.setattr(ModelState, "restore_slot", restore_slot)
    result = run_gate(checkpoint, prompts, "--drafters", "none", "--parallel", "1", "--chunks", "7", "--cache", "warm")
    assert result.exit_code == 1
    assert "1 combinations, 1 different" in result.stdout


def test_a_cache_that_never_serves_is_an_error(
    checkpoint: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_run, "CACHE_BYTES", 0)
    result = run_gate(checkpoint, prompts, "--drafters", "none", "--parallel", "1", "--chunks", "7", "--cache", "warm")
    assert result.exit_code == 1
    assert "never resumed: drafters=none parallel=1 chunk=7 cache=warm" in result.stderr
