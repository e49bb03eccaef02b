# SPDX-License-Identifier: Apache-2.0
"""The commands, and how they are found."""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from fake_transport import FINAL, FakeTransport, Script, answer, response
from tandem_client import ConnectionFailedError, ServerError, TandemClient, cli, commands

Run = Callable[..., tuple[Result, FakeTransport]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `tandem ARGS` against scripts; the transport says what was sent."""

    def invoke(args: list[str], *scripts: Script, stdin: str = "") -> tuple[Result, FakeTransport]:
        transport = FakeTransport(*scripts)
        monkeypatch.setattr(commands, "TandemClient", lambda url, model: TandemClient(url, model, transport=transport))
        return CliRunner().invoke(cli.main, args, input=stdin), transport

    return invoke


def sent(transport: FakeTransport, index: int, name: str) -> Any:
    return json.loads(transport.requests[index].payload.inputs[name].item())


def contents(transport: FakeTransport, index: int) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in sent(transport, index, "messages")]


def test_generate_prints_the_answer(run: Run) -> None:
    result, transport = run(["generate", "Hi"], answer("Hel", "lo ", "é"))
    assert (result.exit_code, result.stdout, result.stderr) == (0, "Hello é\n", "")
    assert transport.requests[0].payload.inputs["text_input"].tolist() == [b"Hi"]
    assert transport.is_closed


def test_generate_sends_its_options(run: Run) -> None:
    options = ["--max-tokens", "9", "--stop", "a", "--stop", "b", "--sampling", '{"drafter": "none"}', "--timeout", "4"]
    _, transport = run(["generate", "Hi", "--model", "other", *options], answer("x"))
    parameters = sent(transport, 0, "sampling_parameters")
    assert parameters == {"drafter": "none", "max_tokens": 9, "stop": ["a", "b"]}
    assert transport.requests[0].payload.timeout_s == 4.0
    assert transport.requests[0].model == "other"


def test_generate_reads_a_chat_from_stdin(run: Run) -> None:
    _, transport = run(["generate", "-", "--system", "Be brief."], answer("x"), stdin="two\nlines")
    assert contents(transport, 0) == [("system", "Be brief."), ("user", "two\nlines")]
    assert contents(run(["generate", "Hi", "--chat"], answer("x"))[1], 0) == [("user", "Hi")]


def test_generate_stats_go_to_stderr(run: Run) -> None:
    drafts = {"total_draft_tokens": 4, "total_accepted_draft_tokens": 3, "acceptance_length": 2.5}
    shares = (
        b'{"lookup": {"drafted": 3, "accepted": 2, "share": 0.67}, "mtp": {"drafted": 1, "accepted": 1, "share": 0.33}}'
    )
    last = response("x", [1], "stop", num_rounds=3, num_cached_tokens=5, drafter_statistics=shares, **drafts)
    result, _ = run(["generate", "Hi", "--stats"], [last, FINAL])
    assert result.stdout == "x\n"
    assert result.stderr == (
        "7 tokens in (5 kept), 1 out in 3 rounds, 2.50 tokens a round, "
        "3 of 4 draft tokens accepted (lookup 67%, mtp 33%)\n"
    )


def test_a_server_error_ends_with_1(run: Run) -> None:
    result, _ = run(["generate", "Hi"], [response("par"), ServerError("INTERNAL", "round failed")])
    assert (result.exit_code, result.stdout) == (1, "par")
    assert "[INTERNAL] round failed" in result.stderr


def test_a_missing_server_is_explained(run: Run) -> None:
    result, _ = run(["generate", "Hi"], [ConnectionFailedError("127.0.0.1:1: refused")])
    assert result.exit_code == 1
    assert "127.0.0.1:1: refused (is the server running?" in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--sampling", "{"], "not valid JSON"),
        (["--sampling", "[1]"], "must be a JSON object"),
        (["--url", "http://host:1"], "must be host:port"),
        (["--max-tokens", "1", "--sampling", '{"max_tokens": 2}'], "--max-tokens: also given"),
        (["--timeout", "0"], "--timeout: must be above 0"),
        (["--max-tokens", "many"], "--max-tokens"),
    ],
)
@pytest.mark.parametrize("command", [["generate", "Hi"], ["chat"]], ids=["generate", "chat"])
def test_wrong_usage_ends_with_2(run: Run, command: list[str], args: list[str], message: str) -> None:
    result, transport = run([*command, *args])
    assert result.exit_code == 2
    assert message in result.stderr
    assert transport.requests == []


def test_ctrl_c_ends_with_130_and_cancels(run: Run) -> None:
    result, transport = run(["generate", "Hi"], [response("par"), KeyboardInterrupt()])
    assert result.exit_code == 130
    assert transport.streams[0].is_cancelled


def test_chat_keeps_a_session_over_the_lines_of_a_pipe(run: Run) -> None:
    lines = "one\n\ntwo\n/reset\nthree\n/quit\nfour\n"
    result, transport = run(["chat", "--system", "S"], answer("a"), answer("b"), [FINAL], answer("c"), stdin=lines)
    assert (result.exit_code, result.stdout) == (0, "a\nb\nc\n")
    assert transport.flags == ["S", "", "Ex", "S", "Ex"]
    assert contents(transport, 0) == [("system", "S"), ("user", "one")]
    assert contents(transport, 1) == [("user", "two")]
    assert contents(transport, 3) == [("system", "S"), ("user", "three")]


def test_chat_ends_at_the_end_of_a_pipe(run: Run) -> None:
    result, transport = run(["chat"], answer("a"), stdin="one")
    assert result.exit_code == 0
    assert transport.flags == ["S", "Ex"]


def test_an_error_ends_a_piped_chat(run: Run) -> None:
    result, transport = run(["chat"], answer("a"), [ServerError("UNAVAILABLE", "full")], stdin="one\ntwo\nthree\n")
    assert result.exit_code == 1
    assert "[UNAVAILABLE] full" in result.stderr
    assert transport.flags == ["S", "", "Ex"]


def test_ctrl_c_in_chat_cancels_that_answer_only(run: Run) -> None:
    script = [response("par"), KeyboardInterrupt()]
    result, transport = run(["chat"], script, answer("b"), stdin="one\ntwo\n")
    assert (result.exit_code, result.stdout) == (0, "parb\n")
    assert "(cancelled)" in result.stderr
    assert [stream.is_cancelled for stream in transport.streams[:2]] == [True, False]
    assert transport.flags == ["S", "", "Ex"]


@click.command()
def hello() -> None:
    """Say hello."""
    click.echo("hello")


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four commands: one that works, and three that are broken in different ways."""
    values = {
        "hello": "test_client_cli:hello",
        "nocommand": "test_client_cli:Run",
        "nomodule": "no_such_module_of_tandem:main",
        "noname": "test_client_cli:missing",
    }
    found = EntryPoints(EntryPoint(name, value, cli.COMMAND_GROUP) for name, value in values.items())
    monkeypatch.setattr(cli, "entry_points", lambda **wanted: found.select(**wanted))


@pytest.mark.usefixtures("plugins")
def test_help_lists_working_and_broken_commands() -> None:
    result = CliRunner().invoke(cli.main, ["--help"])
    assert result.exit_code == 0
    assert "Say hello." in result.stdout
    assert result.stdout.count("(can't be loaded") == 3


@pytest.mark.usefixtures("plugins")
def test_a_broken_command_harms_no_other() -> None:
    assert CliRunner().invoke(cli.main, ["hello"]).stdout == "hello\n"
    broken = CliRunner().invoke(cli.main, ["nomodule", "--port", "1"])
    assert broken.exit_code == 1
    assert "no_such_module_of_tandem" in broken.stderr
    assert CliRunner().invoke(cli.main, ["nocommand"]).exit_code == 1
    assert CliRunner().invoke(cli.main, ["unheard-of"]).exit_code == 2


@pytest.mark.usefixtures("plugins")
def test_only_the_command_that_runs_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    load = EntryPoint.load
    monkeypatch.setattr(EntryPoint, "load", lambda entry: (loaded.append(entry.name), load(entry))[1])
    CliRunner().invoke(cli.main, ["hello"])
    assert set(loaded) == {"hello"}


def test_the_client_needs_no_torch() -> None:
    code = "import sys, tandem_client.cli, tandem_client.commands; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False\n"


def test_generate_and_chat_are_installed() -> None:
    commands_found = cli.main.list_commands(click.Context(cli.main))
    assert {"chat", "generate"} <= set(commands_found)


def test_generate_prints_several_choices_one_after_the_other(run: Run) -> None:
    script = [
        response("on", [1], choice_index=0),
        response("tw", [2], choice_index=1),
        response("o", [3], "stop", choice_index=1),
        response("e", [4], "length", choice_index=0),
        FINAL,
    ]
    result, transport = run(["generate", "Hi", "--sampling", '{"n": 2}', "--stats"], script)
    assert result.stdout == "one\n--- choice 1\ntwo\n"
    assert result.stderr == "7 tokens in, 2 out\n" * 2
    assert sent(transport, 0, "sampling_parameters") == {"n": 2}
