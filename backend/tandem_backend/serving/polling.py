# SPDX-License-Identifier: Apache-2.0
"""How often to ask Triton server which requests were cancelled."""

import time

# Between two looks at who has cancelled, at least. One costs 0.1 ms a request.
POLL_INTERVAL_S = 0.02
POLL_SHARE = 20


def poll_pause_s(begun_s: float) -> float:
    """Until the next look at who has cancelled, after one that began at `begun_s` by time.monotonic().

    Many requests are looked at less often: it must not take more than a twentieth of a thread's time.
    """
    return max(POLL_INTERVAL_S, POLL_SHARE * (time.monotonic() - begun_s))
