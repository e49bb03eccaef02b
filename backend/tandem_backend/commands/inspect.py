# SPDX-License-Identifier: Apache-2.0
"""`tandem inspect`: what a checkpoint is, and whether its logits here are those of transformers."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tandem_backend.errors import TandemError

if TYPE_CHECKING:  # torch and transformers take seconds to import: only when the command runs
    from tandem_backend.commands.compare_transformers import Comparison, Totals


@click.command()
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--compare-transformers", is_flag=True, help="Compare logits with transformers' in float32; needs --prompts."
)
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON lines, each with id and prompt, or id, messages and maybe tools.",
)
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Tokens a prompt.")
@click.option("--limit", type=click.IntRange(min=1), help="Take the first prompts only.")
@click.option("--memory", is_flag=True, help="Tell what sequences take, as admission counts it.")
@click.option(
    "--context", type=click.IntRange(min=1), help="With --memory: tokens.  [default: the checkpoint's context]"
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(
    checkpoint: Path,
    compare_transformers: bool,
    prompts: Path | None,
    max_tokens: int,
    limit: int | None,
    memory: bool,
    context: int | None,
    as_json: bool,
) -> None:
    """Print what CHECKPOINT, a Hugging Face directory, is.

    With --compare-transformers every prompt is continued greedily by transformers in float32, and the logits at all
    positions of that text are compared. Exits 1 when an argmax differs where transformers' two best logits are more
    than 0.05 apart, or when any logit differs by 0.002 or more.
    """
    if compare_transformers != (prompts is not None):
        raise click.UsageError("--compare-transformers and --prompts go together")
    if context is not None and not memory:
        raise click.UsageError("--context goes with --memory")
    try:
        report = _describe(checkpoint)
        if not as_json:
            click.echo(_render(report))
        if memory:
            _add_memory(checkpoint, context, report, as_json=as_json)
        if prompts is not None:
            totals = _compare(checkpoint, prompts, max_tokens, limit, report if as_json else None)
    except TandemError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(report, indent=2))
    if prompts is not None and not totals.agrees:
        sys.exit(1)


def _describe(checkpoint: Path) -> dict[str, Any]:
    from tandem_backend.commands.describe_checkpoint import describe_checkpoint

    return describe_checkpoint(checkpoint)


def _add_memory(checkpoint: Path, context: int | None, report: dict[str, Any], *, as_json: bool) -> None:
    """Into `report`, and to the terminal unless that gets JSON."""
    from tandem_backend.commands.describe_memory import describe_memory, render_memory

    report["memory"] = describe_memory(checkpoint, context)
    if not as_json:
        click.echo(render_memory(report["memory"]))


def _compare(
    checkpoint: Path, prompts: Path, max_tokens: int, limit: int | None, report: dict[str, Any] | None
) -> "Totals":
    """Run the comparison; into `report` if there is one, else to the terminal as it goes."""
    from tandem_backend.commands.compare_transformers import Comparator, Totals, read_prompts

    cases = read_prompts(prompts)[:limit]
    comparator = Comparator(checkpoint)
    results: list[Comparison] = []
    if report is None:
        click.echo(
            f"\n{'prompt':<16}{'positions':>10}{'equal':>8}{'differ at a gap > 0.05':>24}{'max |difference|':>18}"
        )
    for case in cases:
        results.append(comparator.compare(case, max_tokens))
        if report is None:
            _print_comparison(results[-1])
    totals = Totals.of(results)
    if report is None:
        _print_row("total", totals.num_positions, totals.num_equal, totals.num_clear_differences, totals.max_difference)
    else:
        report["comparison"] = {**asdict(totals), "agrees": totals.agrees, "prompts": [asdict(r) for r in results]}
    return totals


def _print_comparison(result: "Comparison") -> None:
    _print_row(result.id, result.num_positions, result.num_equal, result.num_clear_differences, result.max_difference)
    fork = result.fork
    if fork is not None:
        click.echo(
            f"    token {fork.index} differs: ours {fork.our_text!r} ({fork.our_id}), "
            f"transformers' {fork.their_text!r} ({fork.their_id}); "
            f"gap {fork.gap_nats:.3g} nats, {fork.gap_bf16_ulps:.3g} bf16 ulps"
        )


def _print_row(name: str, positions: int, equal: int, clear: int, difference: float) -> None:
    click.echo(f"{name:<16}{positions:>10}{equal:>8}{clear:>24}{difference:>18.2e}")


def _render(report: dict[str, Any]) -> str:
    sizes, layers, parameters = report["sizes"], report["layers"], report["parameters"]
    rope, delta, cuda = report["rope"], report["delta"], report["cuda"]
    kinds = ", ".join(f"{count} {kind}" for kind, count in layers.items())
    scaling = f", {rope['scaling_type']} scaling by {rope['factor']:g}" if rope["scaling_type"] else ""
    rows = {
        "family": report["family"],
        "layers": f"{sum(layers.values())}: {kinds}",
        "parameters": ", ".join(f"{count:,} {part}" for part, count in parameters.items() if count),
        "stored": ", ".join(f"{size:,} bytes {dtype}" for dtype, size in report["bytes"].items()),
        "hidden": f"{sizes['hidden']}, MLP {sizes['intermediate']}",
        "attention": f"{sizes['heads']} heads, {sizes['kv_heads']} of keys and values, {sizes['head_dim']} wide",
    }
    if delta is not None:
        rows["delta"] = (
            f"{delta['key_heads']} key heads of {delta['key_dim']}, {delta['value_heads']} value heads of "
            f"{delta['value_dim']}, {delta['conv_taps']} taps"
        )
    rows |= {
        "rope": f"theta {rope['theta']:g}, {rope['rotary_dim']} of {sizes['head_dim']} dims{scaling}",
        "context": f"{report['context']:,} tokens",
        "vocabulary": f"{report['vocab_size']:,}, embeddings {'tied' if report['tied'] else 'untied'}",
        "eos ids": ", ".join(map(str, report["eos_token_ids"])) or "none",
        "drafters": ", ".join(f"{name} (layers: {n})" for name, n in report["drafters"].items()) or "none",
        "KV": f"{report['kv_bytes_per_token']:,} bytes a token",
        "slot": f"{report['slot_bytes']:,} bytes of recurrent state",
        "on CUDA": f"{cuda['weight_bytes']:,} bytes of weights, {cuda['kv_bytes_per_token']:,} a token, "
        f"{cuda['slot_bytes']:,} a slot",
    }
    return "\n".join([report["checkpoint"], *(f"  {name:<12}{value}" for name, value in rows.items())])
