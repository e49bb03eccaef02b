# SPDX-License-Identifier: Apache-2.0
"""Several choices, one Triton request: each choice has a Responder, and all of them send through one sender."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from tandem_backend.engine.choices import choice_seed
from tandem_backend.serving.response import Choice, Sender
from tandem_backend.serving.triton_errors import FINAL, passed_error
from tandem_backend.types import Request, RequestStats


@dataclass(slots=True)
class _Shared:
    """The request's sender and what its choices have come to. FINAL goes out once, with whatever ends the last one."""

    sender: Sender
    is_streaming: bool
    num_choices: int
    ended: dict[int, Any] = field(default_factory=dict)  # the last response by choice
    is_over: bool = False

    def send(self, index: int, response: Any, flags: int) -> None:
        """Pass on what a choice gave; one that fails ends the request, and what comes after is dropped."""
        if self.is_over:
            return
        if response is None:
            self.sender.send(flags=FINAL)
            self.is_over = True
        elif response.has_error() or passed_error(response) is not None:
            self.sender.send(response, flags=FINAL)
            self.is_over = True
        else:
            self._send_data(index, response, flags)

    def _send_data(self, index: int, response: Any, flags: int) -> None:
        if flags == FINAL:
            self.ended[index] = response
        is_last = len(self.ended) == self.num_choices
        if self.is_streaming:
            self.sender.send(response, flags=FINAL if is_last else 0)
        elif is_last:
            tensors = _join([self.ended[index] for index in range(self.num_choices)])  # held here while they are sent
            self.sender.send(pb_utils.InferenceResponse(output_tensors=tensors), flags=FINAL)
        self.is_over = is_last

    def is_cancelled(self) -> bool:
        """True once the request is over as well: the choices that still run are wanted by nobody."""
        return self.is_over or self.sender.is_cancelled()


@dataclass(frozen=True, slots=True)
class _ChoiceSender:
    shared: _Shared
    index: int

    def send(self, response: Any = None, flags: int = 0) -> None:
        self.shared.send(self.index, response, flags)

    def is_cancelled(self) -> bool:
        return self.shared.is_cancelled()


def choice_senders(
    sender: Sender, request: Request, num_prompt_tokens: int, *, is_streaming: bool
) -> list[tuple[Sender, Choice | None]]:
    """A sender for the Responder of each choice, and which it is; the request's own and None where it has just one."""
    params = request.params
    if params.num_choices == 1:
        return [(sender, None)]
    shared = _Shared(sender, is_streaming, params.num_choices)
    senders: list[tuple[Sender, Choice | None]] = []
    for index in range(params.num_choices):
        seed = choice_seed(request, index) if params.temperature > 0 else None
        unstarted = RequestStats(num_prompt_tokens=num_prompt_tokens, seed=seed)
        senders.append((_ChoiceSender(shared, index), Choice(index, unstarted)))
    return senders


def _join(responses: Sequence[Any]) -> list[Any]:
    """The responses' outputs, each one's elements of all choices one after the other."""
    columns: dict[str, list[Any]] = {}
    for response in responses:
        for tensor in response.output_tensors():
            columns.setdefault(tensor.name(), []).append(tensor.as_numpy())
    return [pb_utils.Tensor(name, np.concatenate(parts)) for name, parts in columns.items()]
