# SPDX-License-Identifier: Apache-2.0
"""Compares llguidance and xgrammar as the library behind structured outputs: correctness, speed, rollback.

    pip install --no-deps xgrammar apache-tvm-ffi     # beside `make install`; the engine does not need them
    python scripts/compare_grammar_libraries.py

Correctness: the JSON-Schema-Test-Suite (draft 2020-12). A schema is refused or claimed; every instance of a claimed
schema is written compactly and fed to the grammar, properties in the order of the schema, the only one both libraries
take. Speed: masks, copies and forced tokens along one document, at the bundled vocabulary (8k) and a synthetic one of
151,936 tokens. Rollback: random walks that go astray and come back.
"""

import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import click
import llguidance
import numpy as np

ROOT = Path(__file__).parents[1]
SUITE = ROOT / "tests" / "json_schema_suite"
TOKENIZER = ROOT / "model_repository" / "tandem" / "1" / "tandem-pydoc" / "tokenizer.json"
LARGE_VOCABULARY = 151_936
EOS = 0

ORDER_SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4,8}$"},
        "placed": {"type": "string", "format": "date-time"},
        "status": {"enum": ["open", "paid", "shipped", "cancelled"]},
        "lines": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {
                    "article": {"type": "string"},
                    "count": {"type": "integer", "minimum": 1, "maximum": 999},
                    "price": {"type": "number"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["article", "count", "price", "tags"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["id", "placed", "status", "lines"],
    "additionalProperties": False,
}
ORDER = {
    "id": "AB-12345",
    "placed": "2024-02-29T12:30:00Z",
    "status": "shipped",
    "lines": [{"article": f"part {n}", "count": n + 1, "price": 2.5 * n, "tags": ["new", "blue"]} for n in range(12)],
}


class Matcher(Protocol):
    def take(self, token: int) -> bool: ...
    def mask(self) -> bytes: ...
    def copy(self) -> "Matcher": ...
    def undo(self, num_tokens: int) -> None: ...
    def forced(self) -> Any: ...
    def is_complete(self) -> bool: ...


class LLGuidanceMatcher:
    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher

    def take(self, token: int) -> bool:
        return bool(self.matcher.consume_token(token))

    def mask(self) -> bytes:
        return bytes(self.matcher.compute_bitmask())

    def copy(self) -> "LLGuidanceMatcher":
        return LLGuidanceMatcher(self.matcher.deep_copy())

    def undo(self, num_tokens: int) -> None:
        self.matcher.rollback(num_tokens)

    def forced(self) -> Any:
        return self.matcher.compute_ff_bytes()

    def is_complete(self) -> bool:
        return bool(self.matcher.is_accepting())


class LLGuidance:
    """llguidance's own tokenizer object is built once a vocabulary."""

    name = "llguidance"

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Vocabulary(tokens)), n_vocab=len(tokens))

    def compile(self, schema: Any) -> Callable[[], Matcher]:
        """Raises ValueError saying why a schema is refused."""
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        matcher = llguidance.LLMatcher(self.tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return lambda: LLGuidanceMatcher(matcher.deep_copy())


class Vocabulary:
    """What llguidance asks of a tokenizer: bytes by id, and a way to tokenise, here greedy."""

    bos_token_id = None
    eos_token_id = EOS
    special_token_ids = (EOS,)

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = list(tokens)
        self._ids = {token: n for n, token in enumerate(tokens)}
        self._longest = max(map(len, tokens))

    def __call__(self, text: str | bytes) -> list[int]:
        data, found = text.encode() if isinstance(text, str) else text, []
        while data:
            n = next(n for n in range(min(self._longest, len(data)), 0, -1) if data[:n] in self._ids)
            found.append(self._ids[data[:n]])
            data = data[n:]
        return found


class XGrammarMatcher:
    def __init__(self, matcher: Any, num_tokens: int) -> None:
        import xgrammar

        self.matcher, self.num_tokens = matcher, num_tokens
        self._bits = xgrammar.allocate_token_bitmask(1, num_tokens)

    def take(self, token: int) -> bool:
        return bool(self.matcher.accept_token(token))

    def mask(self) -> bytes:
        self.matcher.fill_next_token_bitmask(self._bits)
        return self._bits.numpy().tobytes()

    def copy(self) -> "XGrammarMatcher":
        copied = object.__new__(XGrammarMatcher)
        copied.matcher, copied.num_tokens, copied._bits = self.matcher.fork(), self.num_tokens, self._bits
        return copied

    def undo(self, num_tokens: int) -> None:
        self.matcher.rollback(num_tokens)

    def forced(self) -> Any:
        return self.matcher.find_jump_forward_string()

    def is_complete(self) -> bool:
        return bool(self.matcher.is_completed())


class XGrammar:
    name = "xgrammar"

    def __init__(self, tokens: Sequence[bytes]) -> None:
        import xgrammar

        self._xgrammar, self._num_tokens = xgrammar, len(tokens)
        info = xgrammar.TokenizerInfo(list(tokens), vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[EOS])
        self._compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)

    def compile(self, schema: Any) -> Callable[[], Matcher]:
        """Raises ValueError saying why a schema is refused."""
        try:
            compiled = self._compiler.compile_json_schema(json.dumps(schema), strict_mode=False)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        return lambda: XGrammarMatcher(self._xgrammar.GrammarMatcher(compiled), self._num_tokens)


def small_vocabulary() -> list[bytes]:
    """The bundled tokenizer's tokens as bytes; the end of sequence at EOS."""
    from tokenizers import Tokenizer, pre_tokenizers

    vocabulary = Tokenizer.from_file(str(TOKENIZER)).get_vocab(with_added_tokens=True)
    letters = _byte_letters(pre_tokenizers.ByteLevel.alphabet())
    tokens = [b""] * len(vocabulary)
    for text, token_id in vocabulary.items():
        is_added = text.startswith("<") and text.endswith(">") and len(text) > 3
        tokens[token_id] = text.encode() if is_added else bytes(letters[letter] for letter in text)
    return tokens


def _byte_letters(alphabet: Sequence[str]) -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others follow from U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + n): byte for n, byte in enumerate(byte for byte in range(256) if byte not in printable)})
    assert sorted(table) == sorted(alphabet)
    return table


def large_vocabulary() -> list[bytes]:
    """All bytes, then the commonest pieces of words of Python's standard library, up to 151,936 tokens."""
    counts: Counter[bytes] = Counter()
    for path in sorted(Path(json.__file__).parents[1].glob("**/*.py"))[:1500]:
        data = path.read_bytes()
        for word in set(data.split()):
            for n in range(2, min(len(word), 12) + 1):
                counts[word[:n]] += 1
                counts[b" " + word[:n]] += 1
                counts[word[-n:]] += 1
    tokens = [b"<eos>", *(bytes([byte]) for byte in range(256))]
    pieces = sorted(counts, key=lambda piece: (-counts[piece], piece))
    tokens += [piece for piece in pieces if piece not in tokens[:257]][: LARGE_VOCABULARY - len(tokens)]
    if len(tokens) != LARGE_VOCABULARY:
        raise click.ClickException(f"the standard library gave {len(tokens)} tokens only")
    return tokens


def suite() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(SUITE.glob("*.json")):
        for group in json.loads(path.read_text()):
            yield path.stem, group


def in_schema_order(instance: Any, schema: Any) -> Any:
    """The instance with an object's properties in the order in which the schema (at this place) lists them."""
    if isinstance(instance, list):
        items = schema.get("items") if isinstance(schema, dict) else None
        return [in_schema_order(item, items) for item in instance]
    if not isinstance(instance, dict):
        return instance
    properties = schema.get("properties", {}) if isinstance(schema, dict) else {}
    names = [name for name in properties if name in instance]
    names += [name for name in instance if name not in properties]
    return {name: in_schema_order(instance[name], properties.get(name)) for name in names}


def matches(start: Callable[[], Matcher], data: bytes, ids: dict[bytes, int]) -> bool:
    """Whether the grammar takes the bytes and is complete behind them.

    One token a byte, and no look at the masks: where llguidance knows the text it leaves only one tokenisation.
    """
    matcher = start()
    return all(matcher.take(ids[data[n : n + 1]]) for n in range(len(data))) and matcher.is_complete()


def check_suite(library: Any, ids: dict[bytes, int]) -> tuple[Counter[str], list[str]]:
    counts: Counter[str] = Counter()
    unsound: Counter[str] = Counter()
    for keyword, group in suite():
        try:
            start = library.compile(group["schema"])
        except ValueError:
            counts["schemas refused"] += 1
            continue
        counts["schemas claimed"] += 1
        wrong = False
        for test in group["tests"]:
            instance = in_schema_order(test["data"], group["schema"])
            data = json.dumps(instance, separators=(",", ":"), ensure_ascii=False).encode()
            taken = matches(start, data, ids)
            counts[f"{'valid' if test['valid'] else 'invalid'} instances {'taken' if taken else 'not taken'}"] += 1
            wrong |= taken and not test["valid"]
        counts["claimed schemas that take an invalid instance"] += wrong
        unsound[keyword] += wrong
    return counts, [f"{keyword} {n}" for keyword, n in unsound.items() if n]


def time_document(library: Any, tokens: Sequence[bytes]) -> dict[str, float]:
    """Microseconds along one document, tokenised greedily."""
    begun = time.perf_counter()
    start = library.compile(ORDER_SCHEMA)
    compile_us = 1e6 * (time.perf_counter() - begun)
    document = Vocabulary(tokens)(json.dumps(ORDER, separators=(",", ":")))
    times: dict[str, list[float]] = {"mask": [], "copy": [], "forced": [], "take": []}
    for _ in range(3):  # later documents find what the first one made the library compute
        matcher = start()
        for token in document:
            for name, call in (("mask", matcher.mask), ("copy", matcher.copy), ("forced", matcher.forced)):
                begun = time.perf_counter()
                call()
                times[name].append(1e6 * (time.perf_counter() - begun))
            begun = time.perf_counter()
            if not matcher.take(token):
                raise click.ClickException(f"{library.name} does not take the document")
            times["take"].append(1e6 * (time.perf_counter() - begun))
    table = {"compile": compile_us, "mask max": max(times["mask"])}
    for name, values in times.items():
        table[f"{name} median"] = statistics.median(values)
    table["mask mean"] = statistics.mean(times["mask"])
    return table


def check_rollback(library: Any, num_tokens: int, num_walks: int = 200) -> tuple[int, int]:
    """Random walks that go astray and back: masks that differ from the straight walk's, and masks compared."""
    rng, different, compared = random.Random(0), 0, 0
    start = library.compile(ORDER_SCHEMA)
    for _ in range(num_walks):
        matcher, twin = start(), start()
        for _ in range(12):
            allowed = _allowed(matcher.mask(), num_tokens)
            if len(allowed) == 0:
                break
            num_astray = 0
            for _ in range(rng.randint(0, 5)):
                choices = _allowed(matcher.mask(), num_tokens)
                if len(choices) == 0 or not matcher.take(int(rng.choice(choices))):
                    break
                num_astray += 1
            matcher.undo(num_astray)
            different += matcher.mask() != twin.mask()
            different += matcher.copy().mask() != twin.mask()
            compared += 2
            token = int(rng.choice(allowed))
            matcher.take(token)
            twin.take(token)
    return different, compared


def _allowed(mask: bytes, num_tokens: int) -> Any:
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[:num_tokens])


@click.command()
def main() -> None:
    """Print the comparison; the last line is one JSON object."""
    small = small_vocabulary()
    sides = [LLGuidance, XGrammar]
    report: dict[str, Any] = {}
    for side in sides:
        begun = time.perf_counter()
        library = side(small)
        entry = report[side.name] = {"vocabulary_8k_s": time.perf_counter() - begun}
        counts, unsound = check_suite(library, {token: n for n, token in enumerate(small)})
        entry["suite"], entry["unsound"] = dict(counts), unsound
        entry["rollback"] = check_rollback(library, len(small))
        entry["us_8k"] = time_document(library, small)
    large = large_vocabulary()
    for side in sides:
        begun = time.perf_counter()
        library = side(large)
        report[side.name]["vocabulary_150k_s"] = time.perf_counter() - begun
        report[side.name]["us_150k"] = time_document(library, large)
    _print(report)
    json.dump(report, sys.stdout)
    click.echo()


def _print(report: dict[str, Any]) -> None:
    def line(label: str, values: Sequence[Any]) -> None:
        click.echo(f"{label:48}" + "".join(f"{value:>16}" for value in values))

    names = list(report)
    line("", names)
    for key in sorted({key for name in names for key in report[name]["suite"]}):
        line(key, [report[name]["suite"].get(key, 0) for name in names])
    line("masks that differ after rollback or copy", [report[name]["rollback"][0] for name in names])
    line("  of", [report[name]["rollback"][1] for name in names])
    for size in ("8k", "150k"):
        line(f"{size}: vocabulary, s", [f"{report[name][f'vocabulary_{size}_s']:.2f}" for name in names])
        for key in report[names[0]][f"us_{size}"]:
            line(f"{size}: {key}, us", [f"{report[name][f'us_{size}'][key]:.1f}" for name in names])
    for name in names:
        click.echo(f"{name} takes invalid instances of: {', '.join(report[name]['unsound']) or 'none'}")


if __name__ == "__main__":
    main()
