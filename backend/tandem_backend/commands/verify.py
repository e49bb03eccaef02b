# SPDX-License-Identifier: Apache-2.0
"""`tandem verify`: the gate. Decodes in every way there is and accepts no bit that differs from plain decoding."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from tandem_backend.verification.gate import Difference, Line, Plan
    from tandem_backend.verification.prompts import NamedPrompt
    from tandem_backend.verification.records import Answer, RecordedRequest
    from tandem_backend.verification.report import Progress
    from tandem_backend.verification.run import Results

SAMPLING = ("greedy", "seeded", "penalties", "grammar", "logprobs", "stops")
CACHES = ("cold", "warm", "session", "disk")


def _list_of(item: "click.ParamType[Any]") -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """Reads values with commas between them; repeated ones count once."""

    def read(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[Any, ...] | None:
        if text is None:
            return None
        parts = [part.strip() for part in text.split(",")]
        if not all(parts):
            raise click.BadParameter("must be one or more values with commas between them", ctx, param)
        return tuple(dict.fromkeys(item.convert(part, param, ctx) for part in parts))

    return read


def _in_a_folder(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """A file that can't be written is better known before the work than after it."""
    if path is not None and not path.absolute().parent.is_dir():
        raise click.BadParameter(f"the folder {path.parent} does not exist", ctx, param)
    return path


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_NEW_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


@click.command()
@click.option(
    "--checkpoint",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Hugging Face directory of the target.",
)
@click.option("--server", metavar="URL", help="Check a running Triton server (its gRPC service, host:port).")
@click.option("--prompts", "prompts_file", type=_FILE, help="JSON lines with id, and prompt or messages.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=256, show_default=True)
@click.option(
    "--drafters",
    metavar="LIST",
    callback=_list_of(click.STRING),
    help="Drafter sets; names joined by + draft together.  [default: wrong,half,oracle,lookup, and mtp,mtp+lookup "
    "where the checkpoint has a head; with --server what the server drafts with]",
)
@click.option(
    "--parallel", metavar="LIST", callback=_list_of(click.IntRange(1, 512)), default="1,2,4,8", show_default=True
)
@click.option(
    "--chunks",
    metavar="LIST",
    callback=_list_of(click.IntRange(1, 8192)),
    default="1,7,64,512",
    show_default=True,
    help="Prompt rows a pass.",
)
@click.option(
    "--cache",
    "caches",
    metavar="LIST",
    callback=_list_of(click.Choice(CACHES)),
    default="cold",
    show_default=True,
    help="cold: nothing is kept; warm: prompts were asked before; session: two turns of a sequence, the conversation "
    "sent again, and an edited one; disk: prompts were asked before a restart.",
)
@click.option(
    "--sampling",
    "kinds",
    metavar="LIST",
    callback=_list_of(click.Choice(SAMPLING)),
    default="greedy",
    show_default=True,
    help=f"Decode each prompt under each of these kinds of options: {', '.join(SAMPLING)}.",
)
@click.option("--json", "json_file", type=_NEW_FILE, callback=_in_a_folder, help="Write all results to this file.")
@click.option(
    "--record", "record_file", type=_NEW_FILE, callback=_in_a_folder, help="Store the answers to 13 fixed requests."
)
@click.option("--against", "against_file", type=_FILE, help="Hold the present answers to those of a record.")
@click.pass_context
def verify(ctx: click.Context, /, **options: Any) -> None:
    """Check that nothing changes a bit of what a target decodes.

    Decodes every prompt plainly, one row a pass, then under every combination of drafters, parallel requests, chunk
    sizes and caches, and compares token ids, the bits of every logits row (with --server: of the tokens'
    log-probabilities), the log-probabilities asked for, text and finish reason. Exits 1 on any difference, and where
    drafters never drafted or caches never served.

    --record and --against do the same over time, from build to build, with a fixed set of requests. With --server they
    are answered there, and --checkpoint is what it serves, for the fingerprint.
    """
    from tandem_backend.errors import TandemError

    modes = [name for name in ("prompts_file", "record_file", "against_file") if options[name] is not None]
    if len(modes) != 1:
        raise click.UsageError("give one of --prompts, --record and --against")
    try:
        if modes == ["prompts_file"]:
            _run_gate(ctx, **options)
        elif modes == ["record_file"]:
            _record(ctx, options["record_file"], options["checkpoint"], options["server"])
        else:
            _compare(ctx, options["against_file"], options["checkpoint"], options["server"])
    except TandemError as error:
        raise click.ClickException(str(error)) from error


def _run_gate(
    ctx: click.Context,
    prompts_file: Path,
    checkpoint: Path | None,
    server: str | None,
    max_tokens: int,
    drafters: tuple[str, ...] | None,
    parallel: tuple[int, ...],
    chunks: tuple[int, ...],
    caches: tuple[str, ...],
    kinds: tuple[str, ...],
    json_file: Path | None,
    **_: Any,
) -> None:
    from tandem_client import TandemClient

    from tandem_backend.verification.gate import Plan
    from tandem_backend.verification.report import Progress
    from tandem_backend.verification.run import verify_engine, verify_server
    from tandem_backend.verification.sampling import with_kinds

    progress = Progress(lambda text: click.echo(text, err=True))
    prompts = _read_prompts(prompts_file)
    if kinds != ("greedy",):
        prompts = with_kinds(prompts, kinds)
    if checkpoint is not None and server is None:
        plan = Plan(_known_drafters(checkpoint, drafters), parallel, chunks, caches)
        _report(ctx, plan, verify_engine(checkpoint, prompts, max_tokens, plan, progress), prompts, json_file, progress)
    elif server is not None and checkpoint is None:
        if ctx.get_parameter_source("chunks") is not ParameterSource.DEFAULT:
            raise click.BadParameter("the server's engine.json sets its chunk size", param_hint="--chunks")
        for cache in {"session", "disk"}.intersection(caches):
            raise click.BadParameter(f"{cache} needs an engine of this process", param_hint="--cache")
        plan = Plan(_server_drafters(drafters), parallel, (None,), caches)
        with TandemClient(_checked_url(server)) as client:
            _report(ctx, plan, verify_server(client, prompts, max_tokens, plan, progress), prompts, json_file, progress)
    else:
        raise click.UsageError("give one of --checkpoint and --server")


def _report(
    ctx: click.Context,
    plan: "Plan",
    results: "Results",
    prompts: Sequence["NamedPrompt"],
    json_file: Path | None,
    progress: "Progress",
) -> None:
    """Print each line as it comes, then what is wrong; exit 1 if anything is."""
    from tandem_backend.verification.report import difference_text, json_result, table_header, table_line

    kept: list[tuple[Line, Difference | None]] = []
    for line, difference in results:
        if not kept:
            click.echo(table_header())
        click.echo(table_line(line))
        if difference is not None and all(earlier is None for _, earlier in kept):
            click.echo(f"first difference: {difference_text(line, difference, prompts)}")
        kept.append((line, difference))
    if json_file is not None:
        json_file.write_text(json.dumps(json_result(plan, kept, prompts, progress.elapsed_s), indent=1) + "\n", "utf-8")
    num_different = sum(line.is_different for line, _ in kept)
    silent = [line for line, _ in kept if line.never_drafted]
    for line in silent:
        click.echo(f"never drafted: {line.name}", err=True)
    unresumed = [line for line, _ in kept if line.never_resumed]
    for line in unresumed:
        click.echo(f"never resumed: {line.name}", err=True)
    click.echo(f"{len(kept)} combinations, {num_different} different, {len(silent)} without drafts")
    if num_different or silent or unresumed:
        ctx.exit(1)


def _record(ctx: click.Context, path: Path, checkpoint: Path | None, server: str | None) -> None:
    from tandem_backend.engine.fingerprint import take_fingerprint
    from tandem_backend.verification.records import Entry, Record, release_requests, write_record

    if checkpoint is None:
        raise click.UsageError("--record needs --checkpoint (what --server serves, if it is given)")
    requests = release_requests()
    answers = _answer(requests, checkpoint, server)
    entries = [Entry(request=request, answer=answer) for request, answer in zip(requests, answers, strict=True)]
    write_record(path, Record(fingerprint=take_fingerprint(checkpoint), entries=entries))
    click.echo(f"{path}: {len(entries)} requests, {sum(len(answer.token_ids) for answer in answers)} tokens")


def _compare(ctx: click.Context, path: Path, checkpoint: Path | None, server: str | None) -> None:
    from tandem_backend.engine.fingerprint import take_fingerprint
    from tandem_backend.verification.records import first_difference, judge_fingerprint, read_record

    if checkpoint is None:
        raise click.UsageError("--against needs --checkpoint (what --server serves, if it is given)")
    record = read_record(path)
    for note in judge_fingerprint(record.fingerprint, take_fingerprint(checkpoint)):
        click.echo(f"note: {note}")
    answers = _answer([entry.request for entry in record.entries], checkpoint, server)
    problem = first_difference(record.entries, answers)
    if problem is not None:
        click.echo(f"different from {path}: {problem}")
        ctx.exit(1)
    click.echo(f"{len(answers)} requests answered as in {path}, byte for byte")


def _answer(requests: Sequence["RecordedRequest"], checkpoint: Path, server: str | None) -> list["Answer"]:
    from tandem_backend.verification.record_answers import answer_by_server, answer_in_process

    if server is None:
        return answer_in_process(checkpoint, requests)
    return answer_by_server(_checked_url(server), requests)


def _read_prompts(path: Path) -> list["NamedPrompt"]:
    from tandem_backend.verification.prompts import PromptFileError, read_prompts

    try:
        return read_prompts(path)
    except PromptFileError as error:
        raise click.BadParameter(str(error), param_hint="--prompts") from error


def _known_drafters(checkpoint: Path, drafters: tuple[str, ...] | None) -> tuple[str, ...]:
    """The drafter sets to check in this process; those of the checkpoint's head need one."""
    from tandem_backend.model.config import load_model_config
    from tandem_backend.verification.run import MODEL_DRAFTERS, TEST_DRAFTERS

    has_mtp = load_model_config(checkpoint).num_mtp_layers > 0
    known = ["none", *TEST_DRAFTERS, *(name for name in MODEL_DRAFTERS if name != "mtp" or has_mtp)]
    for name in (name for names in drafters or () for name in names.split("+")):
        if name == "mtp" and not has_mtp:
            raise click.BadParameter(
                f"mtp needs a head (mtp.*), and {checkpoint} carries none", param_hint="--drafters"
            )
        if name not in known:
            raise click.BadParameter(f"unknown drafter {name!r}; known: {', '.join(known)}", param_hint="--drafters")
    return drafters or (*TEST_DRAFTERS, "lookup", *(("mtp", "mtp+lookup") if has_mtp else ()))


def _server_drafters(drafters: tuple[str, ...] | None) -> tuple[str, ...]:
    """Names are the server's to know; it has no references for test drafters."""
    from tandem_backend.verification.run import TEST_DRAFTERS
    from tandem_backend.verification.server_target import DEFAULT

    for name in (name for names in drafters or () for name in names.split("+")):
        if name in TEST_DRAFTERS:
            raise click.BadParameter(f"{name} is a test drafter, which a server does not have", param_hint="--drafters")
    return drafters or (DEFAULT,)


def _checked_url(url: str) -> str:
    from tandem_client.transport import check_url

    try:
        return check_url(url)
    except ValueError as error:
        raise click.BadParameter(str(error).removeprefix("url: "), param_hint="--server") from error
