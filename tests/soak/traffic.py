# SPDX-License-Identifier: Apache-2.0
"""The mixed requests of a soak: each kind checks its answer against what the request gets alone."""

import http.client
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from soak.ledger import Ledger, Wrong
from tandem_client import ServerError, TandemClient

NUM_WORKERS = 10
TIMEOUT_S = 120.0
KILL_AFTER_S = 30.0
PROMPTS = (
    "def read_lines(path):\n",
    "class Stack:\n    def push(self, item):\n",
    "The os.path module",
    "import json\n\ndef load(",
    "Grüße, 世界! 😀",
)
LENGTHS = (1, 7, 40)
EXACTLY: dict[str, Any] = {"ignore_eos": True}
DRAFTERS = (None, "none", "lookup", "mtp+lookup")
TURNS = ("What is a tuple?", "And a list?", "Which of them is hashable?")
BAD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"text_input": ""}, "text_input"),
    ({"max_tokens": 3}, "exactly one of"),
    ({"text_input": "x", "max_tokens": 0}, "max_tokens"),
    ({"text_input": "x", "drafter": "no-such"}, "drafter"),
    ({"input_ids": [99_999_999]}, "input_ids"),
)
KILLED_CLIENT = """
import sys
from tandem_client import TandemClient
with TandemClient(sys.argv[1]) as client:
    for chunk in client.generate("x", max_tokens=3000, sampling={"ignore_eos": True}):
        print("token", flush=True)
"""


class Traffic:
    """Workers that send one request after the other until stop(), each of a kind drawn at random."""

    def __init__(self, grpc_url: str, http_url: str, ledger: Ledger, seed: int) -> None:
        self._http_url = http_url
        self._grpc_url = grpc_url
        self._ledger = ledger
        self._seed = seed
        self._client = TandemClient(grpc_url)
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._solo = {(prompt, length): self._complete(prompt, length) for prompt in PROMPTS for length in LENGTHS}
        self._solo_turns = self._session_answers()

    def start(self) -> None:
        self._stopping.clear()
        self._threads = [threading.Thread(target=self._work, args=(number,)) for number in range(NUM_WORKERS)]
        for thread in self._threads:
            thread.start()
        self._seed += 1

    def stop(self) -> None:
        """Returns when the last request has ended."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def burst(self, number: int) -> None:
        """So many answers at once: every pool then has the threads that it needs later."""

        def send(seed: int) -> None:
            with self._ledger.request("burst"):
                self._whole_by_http(random.Random(seed))

        threads = [threading.Thread(target=send, args=(seed,)) for seed in range(number)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def close(self) -> None:
        self._client.close()

    def _work(self, number: int) -> None:
        chance = random.Random(f"{self._seed} {number}")
        kinds: list[tuple[Callable[[random.Random], None], float]] = [
            (self._whole_by_grpc, 3),
            (self._whole_by_http, 3),
            (self._stream_by_http, 3),
            (self._left_by_grpc, 2),
            (self._left_by_http, 2),
            (self._bad, 2),
            (self._session, 2),
            (self._session_begun_anew, 1),
            (self._killed, 0.1),
        ]
        while not self._stopping.is_set():
            (send,) = chance.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])
            with self._ledger.request(send.__name__.lstrip("_")):
                send(chance)

    def _complete(self, prompt: str, length: int, drafter: str | None = None) -> tuple[Any, ...]:
        sampling = EXACTLY | ({"drafter": drafter} if drafter else {})
        answer = self._client.complete(prompt, max_tokens=length, sampling=sampling, logprobs=True, timeout_s=TIMEOUT_S)
        return answer.text, answer.token_ids, answer.logprobs

    def _session_answers(self) -> list[str]:
        with self._client.session() as session:
            return [self._turn(session, text) for text in TURNS]

    def _turn(self, session: Any, text: str) -> str:
        messages = [{"role": "user", "content": text}]
        answer: str = session.complete(messages=messages, max_tokens=12, timeout_s=TIMEOUT_S).text
        return answer

    def _draw(self, chance: random.Random) -> tuple[str, int]:
        return chance.choice(PROMPTS), chance.choice(LENGTHS)

    def _whole_by_grpc(self, chance: random.Random) -> None:
        prompt, length = self._draw(chance)
        drafter = chance.choice(DRAFTERS)
        _check(self._complete(prompt, length, drafter), self._solo[(prompt, length)])

    def _whole_by_http(self, chance: random.Random) -> None:
        prompt, length = self._draw(chance)
        (event,) = self._post("generate", {"text_input": prompt, "max_tokens": length, **EXACTLY})
        _check(event.get("text_output"), prompt + self._solo[(prompt, length)][0])

    def _stream_by_http(self, chance: random.Random) -> None:
        prompt, length = self._draw(chance)
        body = {"text_input": prompt, "max_tokens": length, "stream": True, "return_finish_reason": True, **EXACTLY}
        events = self._post("generate_stream", body)
        _check("".join(event["text_output"] for event in events), self._solo[(prompt, length)][0])
        _check(events[-1]["finish_reason"], "length")

    def _left_by_grpc(self, chance: random.Random) -> None:
        with self._client.generate(PROMPTS[0], max_tokens=2000, sampling=EXACTLY, timeout_s=TIMEOUT_S) as chunks:
            for _ in range(chance.randrange(4)):
                next(chunks)

    def _left_by_http(self, chance: random.Random) -> None:
        connection = http.client.HTTPConnection(self._http_url, timeout=TIMEOUT_S)
        # A whole answer that nobody waits for is written to its end (Triton server does not see the client leave).
        is_stream = chance.random() < 0.7
        length = 2000 if is_stream else 60
        body = {"text_input": PROMPTS[0], "max_tokens": length, "stream": is_stream, **EXACTLY}
        path = "generate_stream" if is_stream else "generate"
        connection.request("POST", f"/v2/models/tandem_generate/{path}", json.dumps(body))
        time.sleep(chance.random() * 0.3)
        connection.close()

    def _bad(self, chance: random.Random) -> None:
        body, field = chance.choice(BAD)
        try:
            self._post(chance.choice(["generate", "generate_stream"]), body)
        except ServerError as error:
            if error.code != "INVALID_ARG":
                raise
            _check(field in error.message, True)
        else:
            raise Wrong(f"{body} was accepted")

    def _session(self, chance: random.Random) -> None:
        with self._client.session() as session:
            for number in range(chance.randint(1, len(TURNS))):
                _check(self._turn(session, TURNS[number]), self._solo_turns[number])

    def _session_begun_anew(self, chance: random.Random) -> None:
        """START on a live sequence: the turn that runs is cancelled, the new conversation is as any other."""
        sequence_id = f"anew-{chance.getrandbits(60)}"
        first = self._client.session(sequence_id)  # its END is that of the second
        with self._client.session(sequence_id) as second:
            long = [{"role": "user", "content": "Tell me all."}]
            running = first.generate(messages=long, max_tokens=1000, sampling=EXACTLY, timeout_s=TIMEOUT_S)
            next(running)
            _check(self._turn(second, TURNS[0]), self._solo_turns[0])
            reasons = [chunk.finish_reason for chunk in running]
            if reasons[-1] not in ("cancelled", "length"):  # "length": it had ended before
                raise Wrong(f"the turn before ended with {reasons[-1]!r}")

    def _killed(self, chance: random.Random) -> None:
        command = [sys.executable, "-c", KILLED_CLIENT, self._grpc_url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as client:
            assert client.stdout is not None
            # grpcio may lock up a client that ends at once, refused by a reload: in _Rendezvous.__del__, beside itself.
            timer = threading.Timer(KILL_AFTER_S, client.kill)
            timer.start()
            client.stdout.readline()  # also comes back when a reload refuses the client
            timer.cancel()
            time.sleep(chance.random() * 0.2)
            client.kill()

    def _post(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of an answer. Raises ServerError for an error of the server."""
        connection = http.client.HTTPConnection(self._http_url, timeout=TIMEOUT_S)
        try:
            connection.request("POST", f"/v2/models/tandem_generate/{path}", json.dumps(body))
            content = connection.getresponse().read().decode("utf-8")
        finally:
            connection.close()
        events = [json.loads(line.removeprefix("data: ")) for line in content.splitlines() if line]
        for event in events:
            if "error" in event:
                raise ServerError.parse(event["error"])
        return events


def _check(answer: object, expected: object) -> None:
    if answer != expected:
        raise Wrong(f"got {answer!r}, alone {expected!r}")
