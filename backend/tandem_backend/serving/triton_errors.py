# SPDX-License-Identifier: Apache-2.0
"""Our errors as Triton's, and as an output from `tandem` to `tandem_generate`. Light: the front imports no engine."""

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from tandem_backend.errors import TandemError

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
# An error that `tandem` sends to `tandem_generate` travels as an output: an error response over BLS, beside streams of
# other requests, crashes Triton server within seconds (seen with 2.51).
ERROR_OUTPUT = "error"


def error_output(error: TandemError) -> Any:
    """The tensor that carries an error."""
    text = json.dumps({"code": error.code, "message": str(error)})
    return pb_utils.Tensor(ERROR_OUTPUT, np.array([text.encode()], dtype=object))


def passed_error(response: Any) -> Any | None:
    """The error in a response's error output, as Triton's; None where it has none."""
    tensor = next((tensor for tensor in response.output_tensors() if tensor.name() == ERROR_OUTPUT), None)
    if tensor is None:
        return None
    values = json.loads(tensor.as_numpy()[0])
    return pb_utils.TritonError(
        f"[{values['code']}] {values['message']}", getattr(pb_utils.TritonError, values["code"])
    )


def triton_error(error: TandemError) -> Any:
    """Triton's error of the same status; the status is in the text too, because HTTP generate always answers 400."""
    return pb_utils.TritonError(error.wire(), getattr(pb_utils.TritonError, error.code))
