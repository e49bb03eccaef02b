# SPDX-License-Identifier: Apache-2.0
"""Who lets go of a BLS response iterator first. The stub does so when it answers is_cancelled() (see the class)."""

import gc
import threading
import weakref
from collections.abc import Callable

from tandem_backend.serving.ended_iterators import EndedIterators


class Iterator:
    """As a BLS response iterator, which nothing but its holders keeps alive."""


class Sender:
    def __init__(self, on_ask: Callable[[], None] = lambda: None, answer: bool = False) -> None:
        self._on_ask = on_ask
        self._answer = answer

    def is_cancelled(self) -> bool:
        self._on_ask()
        return self._answer


def test_an_iterator_lives_until_a_question_asked_after_its_end_is_answered() -> None:
    ended = EndedIterators()
    iterator = Iterator()
    alive = weakref.ref(iterator)
    ended.hold(iterator)
    del iterator
    seen: list[bool] = []
    assert ended.ask_cancelled(Sender(lambda: seen.append(alive() is not None), answer=True))
    gc.collect()
    assert seen == [True]
    assert alive() is None


def test_a_question_from_before_the_end_does_not_count() -> None:
    ended = EndedIterators()
    asked, answer = threading.Event(), threading.Event()

    def wait() -> None:
        asked.set()
        assert answer.wait(10)

    early = threading.Thread(target=ended.ask_cancelled, args=(Sender(wait),))
    early.start()
    assert asked.wait(10)
    iterator = Iterator()
    alive = weakref.ref(iterator)
    ended.hold(iterator)
    del iterator
    answer.set()
    early.join()
    gc.collect()
    assert alive() is not None
    assert not ended.ask_cancelled(Sender())
    gc.collect()
    assert alive() is None
