# SPDX-License-Identifier: Apache-2.0
"""Which of a model's stubs this is, while a reload lets the one before finish its requests beside the new one."""

import errno
import itertools
import os
import socket


class OverlapNumber:
    """The least number that no other stub of this model in this Triton server has; 0 unless a reload overlaps.

    Two stubs must not report the same series: Triton server (2.51) gives both one Prometheus metric, deletes it when
    the first of them lets go, and writes the other's updates into freed memory. The number is an abstract socket's
    name, so it is free again when the process has ended, however it ended.
    """

    def __init__(self, model: str, version: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        for number in itertools.count():
            try:
                self._socket.bind(f"\0tandem-overlap/{os.getppid()}/{version}/{number}/{model}"[:107])
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                self.value = number
                return

    def release(self) -> None:
        self._socket.close()
