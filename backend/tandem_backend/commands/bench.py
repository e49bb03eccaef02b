# SPDX-License-Identifier: Apache-2.0
"""`tandem bench`: speed on this machine. Every figure that is compared with another comes from the same run."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:  # torch takes seconds to import: only when a command runs
    from tandem_backend.verification.prompts import NamedPrompt

REPOSITORY = Path("model_repository")
CHECKPOINT = REPOSITORY / "tandem" / "1" / "tandem-pydoc"
PROMPTS = Path("tests/prompts.jsonl")
ENVOY_CONFIG = Path("docker/envoy/envoy.yaml")

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_NEW_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


def _in_a_folder(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """A file that can't be written is better known before the work than after it."""
    if path is not None and not path.absolute().parent.is_dir():
        raise click.BadParameter(f"the folder {path.parent} does not exist", ctx, param)
    return path


def _checkpoint_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--checkpoint",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        default=CHECKPOINT,
        show_default=True,
        help="Hugging Face directory of the target.",
    )(command)


def _model_repository_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--model-repository",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        default=REPOSITORY,
        show_default=True,
        help="Folder with the models to serve.",
    )(command)


def _measure_options(max_tokens: int = 128, repeats: int = 3) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options of a measurement, with these defaults."""
    options = (
        click.option(
            "--prompts", "prompts_file", type=_FILE, default=PROMPTS, show_default=True, help="As for tandem verify."
        ),
        click.option("--max-tokens", type=click.IntRange(min=8), default=max_tokens, show_default=True),
        click.option(
            "--repeats", type=click.IntRange(min=1), default=repeats, show_default=True, help="Figures are medians."
        ),
        click.option("--json", "json_file", type=_NEW_FILE, callback=_in_a_folder, help="Write the result here too."),
    )

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _decode_options(command: Callable[..., Any]) -> Callable[..., Any]:
    return _checkpoint_option(_measure_options()(command))


@click.group()
def bench() -> None:
    """Measure speed on this machine.

    Tables go to the standard output, and as its last line the result as one JSON object; progress goes to the standard
    error. Nothing else should run on the machine meanwhile.
    """


@bench.command()
@_decode_options
def plain(checkpoint: Path, prompts_file: Path, max_tokens: int, repeats: int, json_file: Path | None) -> None:
    """Plain decoding and prefill, beside transformers.

    Decode and prefill tokens/s beside those of transformers (float32, greedy, with its cache) on the same checkpoint
    and as many threads, decode tokens/s of 1 to 32 sequences in parallel, and the cost of a pass over 1 row and over 8.
    """
    from tandem_backend.benchmarks.environment import num_usable_cores
    from tandem_backend.benchmarks.plain import PlainBench, render_plain

    def measure() -> dict[str, Any]:
        prompts = [named.prompt for named in _read_prompts(prompts_file)]
        return PlainBench(checkpoint, prompts, max_tokens, num_usable_cores()).run(repeats, _say)

    _report(_measured(measure), render_plain, json_file)


@bench.command()
@_decode_options
@click.option("--drafters", default="mtp+lookup", show_default=True, help="Names joined by + draft together.")
def decode(
    checkpoint: Path, prompts_file: Path, max_tokens: int, repeats: int, json_file: Path | None, drafters: str
) -> None:
    """Speculation beside plain decoding.

    The same engine decodes every prompt with drafters and without, in turns of a few tokens, so that a slow spell of
    the machine hits both; a prompt's speedup is the median of its repeats' ratios (15 repeats tell it to some 3 %).
    Then four sequences in joint rounds beside one, all with drafters. Exits 1 when a text is not the one of plain
    decoding.
    """
    from tandem_backend.benchmarks.decode import DecodeBench
    from tandem_backend.benchmarks.decode_report import decode_result, render_decode
    from tandem_backend.benchmarks.environment import num_usable_cores, provenance

    def measure() -> dict[str, Any]:
        prompts = _read_prompts(prompts_file)
        figures = DecodeBench(checkpoint, prompts, drafters, max_tokens, num_usable_cores(), _say).run(repeats)
        return {
            "benchmark": "decode",
            **provenance(num_usable_cores()),
            "checkpoint": checkpoint.name,
            "drafters": drafters,
            "max_tokens": max_tokens,
            "repeats": repeats,
            **decode_result(figures, [named.name for named in prompts], _kinds(prompts_file)),
        }

    _report(_measured(measure), render_decode, json_file)


@bench.command()
@_model_repository_option
@click.option("--triton-server", metavar="PATH", help="Triton server's folder or binary [env: TANDEM_TRITON_SERVER].")
@click.option("--drafter", help="Of all requests; the engine's default otherwise.")
@_measure_options(max_tokens=1024, repeats=9)
def serving(
    model_repository: Path,
    triton_server: str | None,
    drafter: str | None,
    prompts_file: Path,
    max_tokens: int,
    repeats: int,
    json_file: Path | None,
) -> None:
    """What serving costs: tokens/s through gRPC beside the engine in process.

    Starts Triton server, then sends the same requests to it and to an engine of this process, in turns, one alone and
    eight at once. The server, its client and the engine share this machine's cores. Exits 1 when a text differs.
    """
    from tandem_backend.benchmarks.environment import num_usable_cores, provenance
    from tandem_backend.benchmarks.serving import ServingBench, render_serving
    from tandem_backend.config import load_engine_config
    from tandem_backend.serving.launcher import LaunchError, TritonServer, interrupt_on_signals

    def measure() -> dict[str, Any]:
        prompts = _read_prompts(prompts_file)
        config = load_engine_config(model_repository / "tandem" / "1" / "engine.json", {"self_test_rows": 0})
        with TritonServer(model_repository, triton_server=triton_server) as server:
            rows = ServingBench(config, server, prompts, max_tokens, drafter).run(repeats, _say)
        return {
            "benchmark": "serving",
            **provenance(num_usable_cores()),
            "checkpoint": config.checkpoint.name,
            "drafter": drafter or "default",
            "max_tokens": max_tokens,
            "repeats": repeats,
            "stream_interval_ms": config.stream_interval_ms,
            "rows": rows,
        }

    interrupt_on_signals()
    try:
        result = _measured(measure)
    except LaunchError as error:
        raise click.ClickException(str(error)) from error
    _report(result, render_serving, json_file)


@bench.command()
@_model_repository_option
@click.option("--triton-server", metavar="PATH", help="Triton server's folder or binary [env: TANDEM_TRITON_SERVER].")
@click.option("--streams", type=click.IntRange(min=1), default=8, show_default=True, help="At once.")
@_measure_options()
def gateway(
    model_repository: Path,
    triton_server: str | None,
    streams: int,
    prompts_file: Path,
    max_tokens: int,
    repeats: int,
    json_file: Path | None,
) -> None:
    """What the gateway costs: tokens/s through it beside gRPC.

    Starts Triton server and `tandem gateway`, then sends the same requests either way in turns. All of them share this
    machine's cores. Exits 1 when a text differs.
    """
    from tandem_backend.benchmarks.environment import num_usable_cores, provenance
    from tandem_backend.benchmarks.gateway import GatewayBench, render_gateway, running_gateway
    from tandem_backend.serving.launcher import LaunchError, TritonServer, interrupt_on_signals

    def measure() -> dict[str, Any]:
        prompts = _read_prompts(prompts_file)
        with (
            TritonServer(model_repository, triton_server=triton_server) as server,
            running_gateway(server.grpc_url) as process,
        ):
            row = GatewayBench(server.grpc_url, process, prompts, max_tokens, streams).run(repeats, _say)
        figures = {"benchmark": "gateway", **provenance(num_usable_cores())}
        return {**figures, "max_tokens": max_tokens, "repeats": repeats, "rows": [row]}

    interrupt_on_signals()
    try:
        result = _measured(measure)
    except LaunchError as error:
        raise click.ClickException(str(error)) from error
    _report(result, render_gateway, json_file)


@bench.command()
@_checkpoint_option
@click.option(
    "--envoy-config",
    type=_FILE,
    default=ENVOY_CONFIG,
    show_default=True,
    help="Of the proxy, with the replicas of this run in place of its own.",
)
@click.option("--streams", type=click.IntRange(min=1), default=16, show_default=True, help="Requests at a time.")
@_measure_options()
def replicas(
    checkpoint: Path,
    envoy_config: Path,
    streams: int,
    prompts_file: Path,
    max_tokens: int,
    repeats: int,
    json_file: Path | None,
) -> None:
    """What a second replica brings: tokens/s through Envoy of one beside two.

    Each replica has one core and one thread; the client and Envoy share the machine with them. Exits 1 when a text
    differs.
    """
    from tandem_backend.benchmarks.environment import num_usable_cores, provenance
    from tandem_backend.benchmarks.replicas import ReplicaBench, render_replicas
    from tandem_backend.serving.envoy import Envoy, pinned_replicas
    from tandem_backend.serving.launcher import LaunchError, interrupt_on_signals

    def measure() -> dict[str, Any]:
        prompts = _read_prompts(prompts_file)
        with (
            pinned_replicas(checkpoint, 2) as servers,
            Envoy(envoy_config, servers[:1]) as one,
            Envoy(envoy_config, servers) as two,
        ):
            rows = ReplicaBench((one, two), prompts, max_tokens, streams).run(repeats, _say)
        figures = {"benchmark": "replicas", **provenance(num_usable_cores()), "checkpoint": checkpoint.name}
        return figures | {"streams": streams, "max_tokens": max_tokens, "repeats": repeats, "rows": rows}

    interrupt_on_signals()
    try:
        result = _measured(measure)
    except LaunchError as error:
        raise click.ClickException(str(error)) from error
    _report(result, render_replicas, json_file)


@bench.command("verify-curve")
@_checkpoint_option
@click.option("--repeats", type=click.IntRange(min=1), default=31, show_default=True, help="Figures are medians.")
@click.option(
    "--out", type=_NEW_FILE, callback=_in_a_folder, help="Write the table here, for engine.json's verify_curve."
)
def verify_curve(checkpoint: Path, repeats: int, out: Path | None) -> None:
    """The cost of a pass by rows, which the router prices draft rows with.

    Passes over bushy trees of 1 to 64 rows after 256 tokens of context.
    """
    from tandem_backend.benchmarks.environment import num_usable_cores
    from tandem_backend.benchmarks.table import table
    from tandem_backend.benchmarks.verify_curve import measure_verify_curve

    def render(result: dict[str, Any]) -> str:
        return table(["rows", "ms"], [[str(row["rows"]), row["milliseconds"]] for row in result["rows"]])

    _report(_measured(lambda: measure_verify_curve(checkpoint, repeats, num_usable_cores())), render, out)


@bench.command()
@click.option("--shape", type=click.Choice(["qwen3.5-4b", "qwen3.5-9b", "qwen3.5-27b"]), help="With random weights.")
@click.option("--checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Instead of a shape.")
@click.option("--repeats", type=click.IntRange(min=1), default=31, show_default=True, help="Figures are medians.")
@click.option("--json", "json_file", type=_NEW_FILE, callback=_in_a_folder, help="Write the result here too.")
@click.option("--png", "png_file", type=_NEW_FILE, callback=_in_a_folder, help="Draw it here; needs matplotlib.")
def gpu(
    shape: str | None, checkpoint: Path | None, repeats: int, json_file: Path | None, png_file: Path | None
) -> None:
    """A step on a CUDA device, beside the time of reading the weights.

    By rows: a captured pass, its share of the copy-rate floor, and the price of exactness, which is its time over that
    of the same engine on cuBLAS and SDPA. Then prefill, longer contexts, attention alone, and a round with the host.
    """
    from tandem_backend.benchmarks.gpu_report import draw_gpu, render_gpu

    if (shape is None) == (checkpoint is None):
        raise click.UsageError("give either --shape or --checkpoint")
    result = _measured(lambda: _measure_gpu(shape, checkpoint, repeats))
    _report(result, render_gpu, json_file)
    if png_file is not None:
        draw_gpu(result, png_file)


def _measure_gpu(shape: str | None, checkpoint: Path | None, repeats: int) -> dict[str, Any]:
    from tandem_backend.benchmarks.gpu import GpuBench
    from tandem_backend.benchmarks.shapes import write_shape

    if checkpoint is not None:
        return GpuBench(checkpoint, random_weights=False, repeats=repeats, say=_say).run()
    assert shape is not None, "checked by the command"
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / shape
        directory.mkdir()
        return GpuBench(write_shape(shape, directory), random_weights=True, repeats=repeats, say=_say).run()


@bench.command()
@_checkpoint_option
@click.option(
    "--tokens",
    "lengths",
    type=click.IntRange(min=64),
    multiple=True,
    default=(1024, 4096, 16384, 32768),
    show_default=True,
    help="Prompt lengths; may be repeated.",
)
@click.option("--repeats", type=click.IntRange(min=1), default=1, show_default=True, help="Figures are medians.")
@click.option("--json", "json_file", type=_NEW_FILE, callback=_in_a_folder, help="Write the result here too.")
def resume(checkpoint: Path, lengths: tuple[int, ...], repeats: int, json_file: Path | None) -> None:
    """Time to first token of a prompt: cold, resumed, and resumed from disk after a restart.

    Each prompt is asked with nothing cached, then again with 16 tokens more, as the next turn of a conversation. Then
    the engine is shut down, and its successor is asked for another such turn. The operating system may have the files
    in memory still. A checkpoint whose context is shorter is given a longer one. Cold prompts of 32k tokens take
    minutes on a CPU.
    """
    from tandem_backend.benchmarks.environment import num_usable_cores
    from tandem_backend.benchmarks.resume import measure_resume, render_resume

    result = _measured(lambda: measure_resume(checkpoint, lengths, repeats, num_usable_cores(), _say))
    _report(result, render_resume, json_file)


def _say(text: str) -> None:
    click.echo(text, err=True)


@bench.command()
@_checkpoint_option
@click.option("--max-tokens", type=click.IntRange(min=8), default=128, show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Figures are medians.")
@click.option("--json", "json_file", type=_NEW_FILE, callback=_in_a_folder, help="Write the result here too.")
def structured(checkpoint: Path, max_tokens: int, repeats: int, json_file: Path | None) -> None:
    """Answers with a JSON Schema beside free answers to the same prompts.

    Plainly, with the default drafters, and drafting only what the schema forces. Exits 1 when a text differs.
    """
    from tandem_backend.benchmarks.structured import StructuredBench, render_structured

    _report(_measured(lambda: StructuredBench(checkpoint, max_tokens, _say).run(repeats)), render_structured, json_file)


@bench.command("suffix-store")
@click.option("--tokens", type=click.IntRange(min=1), default=50_000_000, show_default=True, help="Size of the store.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Keep the store in this new directory.")
@click.option("--json", "json_file", type=_NEW_FILE, callback=_in_a_folder, help="Write the result here too.")
def suffix_store(tokens: int, out: Path | None, json_file: Path | None) -> None:
    """The time of one look-up of the lookup drafter.

    In a store of made-up texts, opened anew, after one look-up of each kind has brought it into memory.
    """
    from tandem_backend.benchmarks.suffix_store import measure_suffix_store, render_suffix_store

    _report(_measured(lambda: measure_suffix_store(tokens, out)), render_suffix_store, json_file)


def _measured(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    from tandem_backend.errors import TandemError

    try:
        return measure()
    except TandemError as error:
        raise click.ClickException(str(error)) from error


def _report(result: dict[str, Any], render: Callable[[dict[str, Any]], str], file: Path | None) -> None:
    line = json.dumps(_rounded(result))
    if file is not None:
        file.write_text(line + "\n", encoding="utf-8")
    click.echo(render(result))
    click.echo(line)


def _rounded(value: Any) -> Any:
    """Four digits after the point are more than any figure here is good for."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


def _read_prompts(path: Path) -> list["NamedPrompt"]:
    from tandem_backend.verification.prompts import PromptFileError, read_prompts

    try:
        return read_prompts(path)
    except PromptFileError as error:
        raise click.ClickException(str(error)) from error


def _kinds(path: Path) -> dict[str, str]:
    """Kinds by prompt id, of a file that `read_prompts` took; prompts that name none are of one kind."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return {str(line["id"]): str(line.get("kind", "prompts")) for line in lines}
