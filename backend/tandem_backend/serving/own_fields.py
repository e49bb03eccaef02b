# SPDX-License-Identifier: Apache-2.0
"""Fields of our own among the sampling values: on state that is kept, how tokens are shown, what an admin asks."""

import hmac
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from tandem_backend.errors import InvalidRequestError
from tandem_backend.serving.sampling import validated

CLEAR_CACHES = "clear_caches"


class OwnFields(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    cache_salt: Annotated[str, Field(max_length=256)] = ""
    logprobs_bytes: bool = False
    whole_conversation: bool = False
    admin: Annotated[str, Field(pattern=f"^{CLEAR_CACHES}$")] | None = None
    admin_token: str = ""


@dataclass(frozen=True, slots=True)
class AdminCall:
    """What an admin asks instead of a generation; not to be done before `check` let it pass."""

    action: str
    token: str

    def check(self, admin_token: str | None) -> None:
        """Raises InvalidRequestError unless the call brings the model's admin_token."""
        if admin_token is None:
            raise InvalidRequestError("admin: this model takes no admin requests; engine.json has no admin_token")
        if not hmac.compare_digest(self.token.encode(), admin_token.encode()):
            raise InvalidRequestError("admin_token: is not this model's")


def take_own(values: dict[str, Any]) -> tuple[OwnFields, AdminCall | None]:
    """Take the fields out of `values`, and the admin's call if it is one.

    Raises InvalidRequestError naming the field.
    """
    own = validated(OwnFields, {name: values.pop(name) for name in OwnFields.model_fields if name in values})
    return own, AdminCall(own.admin, own.admin_token) if own.admin is not None else None
