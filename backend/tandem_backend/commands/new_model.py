# SPDX-License-Identifier: Apache-2.0
"""`tandem new-model`: a Triton model folder for a checkpoint, with its stateless front."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import click

from tandem_backend.config import EngineConfig, load_engine_config
from tandem_backend.errors import ConfigError, TandemError

_CHECKPOINT = click.Path(exists=True, file_okay=False, path_type=Path)
DRAFT_MODEL = "draft_model"


def _read_settings(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> dict[str, Any]:
    """KEY=VALUE by key; a value is JSON, or text where it is none."""
    settings: dict[str, Any] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator:
            raise click.BadParameter(f"must be KEY=VALUE, got {text!r}", ctx, param)
        if key in ("checkpoint", "drafters", DRAFT_MODEL):
            raise click.BadParameter(f"{key}: give it with --target, --drafter or --draft-model", ctx, param)
        try:
            settings[key] = json.loads(value)
        except ValueError:
            settings[key] = value
    return settings


@click.command("new-model")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--target", type=_CHECKPOINT, required=True, help="Hugging Face directory of the target.")
@click.option(
    "--drafter",
    metavar="NAMES",
    help="Who drafts for requests that name nobody, joined by +: lookup, mtp, auto, or none.  [default: auto]",
)
@click.option("--draft-model", type=_CHECKPOINT, help="Checkpoint of the drafter draft_model, which drafts too.")
@click.option(
    "--set",
    "settings",
    metavar="KEY=VALUE",
    multiple=True,
    callback=_read_settings,
    help="Another key of engine.json, as max_active=16; repeat it for more.",
)
@click.option("--link", is_flag=True, help="Link the checkpoints instead of copying them: not for object stores.")
@click.option("--version", type=click.IntRange(min=1), default=1, show_default=True, help="The model's version.")
@click.option(
    "--front/--no-front", default=True, show_default=True, help="Write DIR_generate too, its stateless front."
)
@click.option("--without-tokenizer", is_flag=True, help="Take a checkpoint that has none: requests send input_ids.")
@click.option("--force", is_flag=True, help="Replace the version where it is there already.")
def new_model(
    folder: Path,
    target: Path,
    drafter: str | None,
    draft_model: Path | None,
    settings: dict[str, Any],
    link: bool,
    version: int,
    front: bool,
    without_tokenizer: bool,
    force: bool,
) -> None:
    """Write a Triton model folder for a checkpoint.

    DIR is the model's folder in a model repository, and its name the model's. The checkpoint is checked first, down to
    the shape of every tensor, without reading the weights. Nothing is left where something is wrong.
    """
    from tandem_backend.serving.model_folder import ModelFolder

    checkpoints = {_name(target): target}
    engine: dict[str, Any] = {"checkpoint": _name(target)}
    names = [] if drafter == "none" else (drafter or "auto").split("+")
    if draft_model is not None:
        names.append(DRAFT_MODEL)
        engine[DRAFT_MODEL] = f"draft-{_name(draft_model)}"
        checkpoints[engine[DRAFT_MODEL]] = draft_model
    if drafter is not None or draft_model is not None:
        engine["drafters"] = names
    model = ModelFolder(
        folder=Path(os.path.abspath(folder)),
        version=version,
        engine=engine | settings,
        checkpoints=checkpoints,
        link=link,
        with_front=front,
        replace=force,
    )
    try:
        model.check()
        drafters = _check(engine | settings, checkpoints, needs_tokenizer=not without_tokenizer)
        written = model.write()
    except (TandemError, OSError) as error:
        raise click.ClickException(str(error)) from error
    for path in written:
        click.echo(path)
    click.echo(f"model {model.folder.name}, version {version}, drafters: {', '.join(drafters) or 'none'}")


def _name(checkpoint: Path) -> str:
    return Path(os.path.abspath(checkpoint)).name


def _check(engine: dict[str, Any], checkpoints: dict[str, Path], *, needs_tokenizer: bool) -> tuple[str, ...]:
    """The drafters by name. Raises ConfigError and CheckpointError."""
    from tandem_backend.engine.check import check_checkpoints

    places = {key: str(checkpoints[value].absolute()) for key, value in engine.items() if key in _PATHS}
    config = _load(engine | places)
    return check_checkpoints(config, needs_tokenizer=needs_tokenizer).names


_PATHS = ("checkpoint", DRAFT_MODEL)


def _load(engine: dict[str, Any]) -> EngineConfig:
    """The configuration as the engine will read it. Raises ConfigError naming the key."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "engine.json"
        path.write_text(json.dumps(engine), encoding="utf-8")
        try:
            return load_engine_config(path)
        except ConfigError as error:
            raise ConfigError(str(error).removeprefix(f"{folder}/")) from error
