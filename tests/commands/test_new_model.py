# SPDX-License-Identifier: Apache-2.0
"""`tandem new-model`: what it writes, what it refuses, and that it writes all or nothing."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from fakes.tiny_model import edit_config, tiny_checkpoint
from fakes.tiny_text_model import tiny_text_checkpoint
from safetensors.torch import load_file, save_file
from tandem_backend.commands.new_model import new_model
from tandem_backend.config import load_engine_config
from tandem_backend.engine import Engine
from tandem_backend.serving import model_folder

REPOSITORY = Path(__file__).parents[2] / "model_repository"
CHECKPOINT = REPOSITORY / "tandem" / "1" / "tandem-pydoc"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny")


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Path]:
    """Where models are written to; nothing but models is ever left in it."""
    yield tmp_path / "repository"
    assert not list((tmp_path / "repository").glob(".*"))


def run(folder: Path, target: Path, *arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(new_model, [str(folder), "--target", str(target), *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def refusal(folder: Path, target: Path, *arguments: object) -> str:
    """What the command says; nothing may have been written."""
    before = sorted(folder.parent.rglob("*"))
    code, output = run(folder, target, *arguments)
    assert code in (1, 2), output
    assert sorted(folder.parent.rglob("*")) == before
    return output


def files(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_the_repository_of_this_project_is_what_the_command_writes(repository: Path) -> None:
    code, output = run(repository / "tandem", CHECKPOINT)
    assert code == 0, output
    assert output.splitlines()[-1] == "model tandem, version 1, drafters: lookup, mtp"
    for name in ("tandem", "tandem_generate"):
        assert files(repository / name) == files(REPOSITORY / name)


def test_names_agree_and_the_folder_may_be_moved(repository: Path, target: Path, tmp_path: Path) -> None:
    code, output = run(repository / "qwen", target, "--set", "max_active=3", "--set", "device=cpu", "--drafter", "mtp")
    assert code == 0, output
    assert 'name: "qwen"' in (repository / "qwen" / "config.pbtxt").read_text()
    front = (repository / "qwen_generate" / "config.pbtxt").read_text()
    assert 'name: "qwen_generate"' in front
    assert re.search(r'key: "model_name" value \{ string_value: "qwen" \}', front)
    assert "tandem" not in re.sub(r"#.*|tandem serve", "", front)
    moved = shutil.copytree(repository, tmp_path / "elsewhere")
    shutil.rmtree(repository)
    config = load_engine_config(moved / "qwen" / "1" / "engine.json", {"self_test_rows": 0})
    assert (config.max_active, config.device, config.drafters) == (3, "cpu", ("mtp",))
    assert Engine(config).model.config.vocab_size > 0
    assert config.checkpoint == moved / "qwen" / "1" / "tiny"


def test_a_link_is_relative_and_a_copy_leaves_out_what_is_not_read(repository: Path, target: Path) -> None:
    for name in ("pytorch_model.bin", "other.safetensors", ".hidden.json"):
        (target / name).write_text("not read")
    try:
        assert run(repository / "copied", target, "--no-front")[0] == 0
        assert run(repository / "linked", target, "--no-front", "--link")[0] == 0
    finally:
        for name in ("pytorch_model.bin", "other.safetensors", ".hidden.json"):
            (target / name).unlink()
    assert files(repository / "copied" / "1" / "tiny") == files(target)
    link = repository / "linked" / "1" / "tiny"
    assert not link.readlink().is_absolute()
    assert link.resolve() == target.resolve()
    assert load_engine_config(repository / "linked" / "1" / "engine.json").checkpoint == target.resolve()
    assert not (repository / "copied_generate").exists()


def test_versions_stand_side_by_side_and_none_is_replaced_unasked(repository: Path, target: Path) -> None:
    assert run(repository / "m", target)[0] == 0
    edited = "# edited by the operator\n" + (repository / "m" / "config.pbtxt").read_text()
    (repository / "m" / "config.pbtxt").write_text(edited)
    assert "m/1: is there already; --force replaces it, --version adds another" in refusal(repository / "m", target)
    code, output = run(repository / "m", target, "--version", 2, "--set", "max_active=7")
    assert code == 0, output
    assert output.splitlines() == [str(repository / "m" / "2"), "model m, version 2, drafters: lookup, mtp"]
    assert run(repository / "m", target, "--force", "--set", "max_active=5")[0] == 0
    active = [json.loads((repository / "m" / v / "engine.json").read_text())["max_active"] for v in "12"]
    assert active == [5, 7]
    assert (repository / "m" / "config.pbtxt").read_text() == edited


def test_a_draft_model_comes_along(repository: Path, target: Path, tmp_path: Path) -> None:
    draft = tiny_text_checkpoint(tmp_path / "small", seed=5)
    code, output = run(repository / "m", target, "--draft-model", draft, "--drafter", "lookup")
    assert code == 0, output
    assert output.splitlines()[-1] == "model m, version 1, drafters: lookup, draft_model"
    config = load_engine_config(repository / "m" / "1" / "engine.json")
    assert config.draft_model == repository / "m" / "1" / "draft-small"
    other = tiny_checkpoint(tmp_path / "other", "llama", vocab_size=99)
    output = refusal(repository / "n", target, "--draft-model", other)
    assert "draft_model: its vocabulary has 99 tokens, the target's 259" in output


def test_a_checkpoint_that_can_t_be_served_is_refused_by_name(repository: Path, target: Path, tmp_path: Path) -> None:
    def damaged(name: str) -> Path:
        return shutil.copytree(target, tmp_path / name)

    folder = repository / "m"
    family = edit_config(damaged("family"), model_type="mamba2")
    assert "mamba2" in refusal(folder, family)
    bare = tiny_checkpoint(tmp_path / "bare", "llama")
    assert "bare: has no tokenizer (tokenizer.json)" in refusal(folder, bare)
    smaller = tiny_checkpoint(damaged("smaller"), "llama", vocab_size=200)
    assert "the tokenizer has token ids up to 258, the model ids below 200" in refusal(folder, smaller)
    assert "'mtp' reads the checkpoint's mtp.* head" in refusal(
        folder, tiny_checkpoint(damaged("plain"), "llama", vocab_size=259), "--drafter", "mtp"
    )
    assert "unknown drafter 'eagle'" in refusal(folder, target, "--drafter", "lookup+eagle")
    missing = damaged("missing")
    tensors = load_file(missing / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.1.self_attn.o_proj.weight"))
    save_file({key: value for key, value in tensors.items() if key != name}, missing / "model.safetensors")
    assert f"tensor {name!r} is missing" in refusal(folder, missing)
    save_file({**tensors, name: torch.zeros(3, 5)}, missing / "model.safetensors")
    assert f"tensor {name!r} has shape (3, 5)" in refusal(folder, missing)
    torn = damaged("torn")
    content = (torn / "model.safetensors").read_bytes()
    (torn / "model.safetensors").write_bytes(content[: len(content) // 2])
    assert "torn/model.safetensors: can't be read" in refusal(folder, torn)
    assert run(folder, bare, "--without-tokenizer")[0] == 0


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("-m", (), "the folder's name is the model's"),
        ("m", ("--set", "max_activ=1"), "engine.json: max_activ: unknown key"),
        ("m", ("--set", "max_active=none"), "engine.json: max_active: "),
        ("m", ("--set", "max_context_len=99999"), "max_context_len: at most 512"),
        ("m", ("--set", "drafters=[]"), "drafters: give it with"),
        ("m", ("--set", "max_active"), "must be KEY=VALUE"),
    ],
)
def test_bad_arguments_are_named(
    repository: Path, target: Path, name: str, arguments: tuple[str, ...], message: str
) -> None:
    folder = repository / name
    assert message in refusal(folder, target, *arguments).replace("\n", " ")


def test_what_stands_in_the_way_is_left_alone(repository: Path, target: Path) -> None:
    (repository / "notes").mkdir(parents=True)
    (repository / "notes" / "todo.txt").write_text("mine")
    assert "notes: is there already and no Triton model" in refusal(repository / "notes", target, "--force")
    (repository / "m_generate").mkdir()
    (repository / "m_generate" / "config.pbtxt").write_text('name: "m_generate"\n')
    assert "is there already and no front of m; see --no-front" in refusal(repository / "m", target)
    assert run(repository / "m", target, "--no-front")[0] == 0


def test_nothing_is_left_of_what_fails_midway(repository: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(repository / "m", target)[0] == 0
    before = files(repository)
    rename = Path.rename

    def failing_rename(source: Path, to: Path) -> Path:
        if to.name == "n_generate":
            raise OSError(28, "No space left on device")
        return rename(source, to)

    monkeypatch.setattr(Path, "rename", failing_rename)
    assert "No space left on device" in refusal(repository / "n", target)
    monkeypatch.undo()

    def failing_copy(source: Path, to: Path) -> None:
        to.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_folder.shutil, "copyfile", failing_copy)
    assert "No space left on device" in refusal(repository / "m", target, "--force")
    assert files(repository) == before
