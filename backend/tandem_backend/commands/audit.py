# SPDX-License-Identifier: Apache-2.0
"""`tandem audit`: holds answers to their receipts, bit for bit."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

NOT_JUDGED = 2  # exit status; 1: refuted


@click.command()
@click.option(
    "--checkpoint",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    required=True,
    help="Hugging Face directory of the model that gave the answers.",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.argument("receipts", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def audit(checkpoint: Path, device: str, receipts: Sequence[Path]) -> None:
    """Run each receipt's request again, alone, cold and without speculation.

    Prints a line a receipt: confirmed, refuted (and the first token that differs), or why it can't be judged here
    (another checkpoint, other kernels, another device). A file may hold several receipts, one a line. Exits 1 when one
    is refuted, 2 when none is but one can't be judged.
    """
    from tandem_backend.errors import TandemError
    from tandem_backend.verification.audit import Auditor, Verdict

    try:
        auditor = Auditor(checkpoint, device, len(os.sched_getaffinity(0)))
    except TandemError as error:
        raise click.ClickException(str(error)) from error
    counts = dict.fromkeys(Verdict, 0)
    for name, text in _texts(receipts):
        finding = auditor.audit(text)
        counts[finding.verdict] += 1
        click.echo(f"{name}: {finding.verdict}: {finding.why}")
    click.echo(", ".join(f"{number} {verdict}" for verdict, number in counts.items()))
    if counts[Verdict.REFUTED]:
        raise SystemExit(1)
    if counts[Verdict.NOT_JUDGED]:
        raise SystemExit(NOT_JUDGED)


def _texts(paths: Sequence[Path]) -> Iterator[tuple[str, str]]:
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise click.ClickException(f"{path}: {error}") from error
        filled = [(number, line) for number, line in enumerate(lines, start=1) if line]
        for number, line in filled or [(1, "")]:
            yield str(path) if len(filled) < 2 else f"{path}:{number}", line
