# SPDX-License-Identifier: Apache-2.0
"""READMEs say what the code says: every engine.json key, and the example drafter word for word."""

import json
from pathlib import Path

import pytest
from tandem_backend.config import EngineConfig

ROOT = Path(__file__).parents[2]
BACKEND_README = (ROOT / "backend" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("key", EngineConfig.model_fields)
def test_every_key_is_in_the_table_with_its_default_and_meaning(key: str) -> None:
    field = EngineConfig.model_fields[key]
    table = BACKEND_README.split("## Configuration")[1].splitlines()
    rows = [line for line in table if line.startswith(f"| `{key}` |")]
    assert len(rows) == 1
    _, _, default, _, meaning, _ = (cell.strip() for cell in rows[0].split("|"))
    assert meaning == field.description
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    assert default == ("required" if field.is_required() else f"`{json.dumps(value)}`")


def test_the_example_drafter_is_quoted_whole() -> None:
    source = (ROOT / "tests" / "engine" / "example_drafter.py").read_text(encoding="utf-8")
    assert source.split("\n", 1)[1].strip() in BACKEND_README


@pytest.mark.parametrize("folder", ["", "backend", "kernels", "client", "model_repository", "tests", "docker"])
def test_every_folder_has_its_readme(folder: str) -> None:
    assert len((ROOT / folder / "README.md").read_text(encoding="utf-8")) > 300
