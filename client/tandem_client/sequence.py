# SPDX-License-Identifier: Apache-2.0
"""The flags of a Triton sequence from its first turn to its end. Pure; shared by both clients."""

from uuid import uuid4

from tandem_client.conversation import Conversation, Turn
from tandem_client.errors import TandemClientError
from tandem_client.payload import Payload, stop_payload
from tandem_client.wire import InferRequest, SequenceId

# Ending a sequence only drops state: a server that takes longer is in trouble, and sweeps idle sequences itself.
END_TIMEOUT_S = 10.0


def one_shot(model: str, payload: Payload) -> InferRequest:
    """A request that is a whole sequence of its own."""
    return InferRequest(
        model=model,
        request_id=uuid4().hex,
        sequence_id=uuid4().hex,
        sequence_start=True,
        sequence_end=True,
        payload=payload,
    )


class SequenceState:
    """What the server knows of a sequence: nothing, perhaps something (START was sent), or its turns (accepted).

    With `resumes` the conversation is kept here too, and sent whole to a server that does not know it. Behind a proxy
    turns go by `route`, by default the first sequence id.
    """

    def __init__(
        self, model: str, sequence_id: SequenceId | None = None, *, resumes: bool = False, route: str | None = None
    ) -> None:
        if sequence_id == "" or (isinstance(sequence_id, int) and not 0 < sequence_id < 2**63):
            raise ValueError(f"sequence_id: must be text or an integer from 1 to 2**63 - 1, got {sequence_id!r}")
        self.sequence_id = uuid4().hex if sequence_id is None else sequence_id
        self._session = self.sequence_id if route is None else route
        self.is_accepted = False
        self._model = model
        self._is_started = False
        self._resumes = resumes
        self._conversation = Conversation()

    def turn(self, payload: Payload) -> InferRequest:
        """The next turn. It carries START until the server has answered one, as a refused turn opens nothing."""
        request = self._request(payload, start=not self.is_accepted, end=False)
        self._is_started = True
        return request

    def record(self, payload: Payload) -> Turn | None:
        """Follows the turn for the conversation; None where that is not kept. Raises ValueError without messages."""
        return self._conversation.turn(payload) if self._resumes else None

    def again(self, turn: Turn | None, error: TandemClientError) -> InferRequest | None:
        """The turn with all before it, as a first one, where `error` says that the server doesn't know the sequence.

        It gets a fresh sequence id: behind a proxy the old one may live on where later turns come to again, and there
        the turns in between would be missing.
        """
        payload = turn.whole(error) if turn is not None and self.is_accepted else None
        if payload is None:
            return None
        self.is_accepted, self.sequence_id = False, uuid4().hex
        return self.turn(payload)

    def accept(self) -> None:
        """The server has answered a turn."""
        self.is_accepted = True

    def end(self) -> InferRequest | None:
        """The request that drops the sequence on the server; None where no turn was sent. The next turn starts anew."""
        if not self._is_started:
            return None
        self.is_accepted = self._is_started = False
        self._conversation = Conversation()
        return self._request(stop_payload(END_TIMEOUT_S), start=False, end=True)

    def _request(self, payload: Payload, *, start: bool, end: bool) -> InferRequest:
        return InferRequest(
            model=self._model,
            request_id=uuid4().hex,
            sequence_id=self.sequence_id,
            sequence_start=start,
            sequence_end=end,
            payload=payload,
            session=self._session,
        )
