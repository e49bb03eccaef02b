# SPDX-License-Identifier: Apache-2.0
"""Python's logging into Triton server's log."""

import logging

import triton_python_backend_utils as pb_utils


class TritonLogHandler(logging.Handler):
    """Passes records on at Triton's level of the same name; an exception's traceback goes with its record."""

    def emit(self, record: logging.LogRecord) -> None:
        logger = pb_utils.Logger
        send = logger.log_info
        if record.levelno >= logging.ERROR:
            send = logger.log_error
        elif record.levelno >= logging.WARNING:
            send = logger.log_warn
        send(self.format(record))


def log_to_triton() -> None:
    """Send the records of Tandem's loggers to Triton server, those of level INFO and up."""
    root = logging.getLogger("tandem_backend")
    root.setLevel(logging.INFO)
    root.handlers = [TritonLogHandler()]
    root.propagate = False
