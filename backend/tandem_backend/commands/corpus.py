# SPDX-License-Identifier: Apache-2.0
"""`tandem corpus`: texts that the lookup drafter draws on, made ready ahead of time."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from tandem_backend.engine.suffix_store import build_corpus, store_fingerprint
from tandem_backend.engine.tokenizer import Tokenizer
from tandem_backend.errors import TandemError
from tandem_backend.model.config import load_model_config


@click.group()
def corpus() -> None:
    """Texts for the lookup drafter."""


@corpus.command()
@click.option(
    "--checkpoint",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    required=True,
    help="Hugging Face directory of the target: its tokenizer is used.",
)
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="New directory for the corpus."
)
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def build(checkpoint: Path, out: Path, files: Sequence[Path]) -> None:
    """Write a corpus for engine.json's lookup_corpora.

    A file is one document, a line of a .jsonl file ({"text": ...}) is one too.
    """
    try:
        vocab_size = load_model_config(checkpoint).vocab_size
        tokenizer = Tokenizer(checkpoint)
        documents = (tokenizer.encode(text, add_special_tokens=False) for path in files for text in _texts(path))
        num_tokens = build_corpus(out, store_fingerprint(tokenizer, vocab_size), vocab_size, documents)
    except TandemError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{out}: {num_tokens} tokens of {len(files)} files")


def _texts(path: Path) -> Iterator[str]:
    try:
        content = path.read_text(encoding="utf-8")
        if path.suffix != ".jsonl":
            yield content
            return
        for number, line in enumerate(content.splitlines(), start=1):
            if line.strip():
                text = json.loads(line).get("text")
                if not isinstance(text, str):
                    raise click.ClickException(f"{path}, line {number}: text: must be a string")
                yield text
    except (OSError, ValueError, AttributeError) as error:
        raise click.ClickException(f"{path}: {error}") from error
