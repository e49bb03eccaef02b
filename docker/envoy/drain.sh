#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run before Envoy is stopped, because SIGTERM cuts its streams: clients are sent elsewhere, and what runs gets SECONDS to end.
#
#   drain.sh SECONDS [ADMIN_PORT]
#
# Envoy's image has no curl. The exit status is 0 also where Envoy has gone or does not answer: the stop has to go on.
set -euo pipefail

end=$((SECONDS + ${1:?SECONDS is missing})) # bash begins to count at what its environment says
port=${2:-9901}

# METHOD PATH: the answer of Envoy's admin.
admin() (
    exec 3<> "/dev/tcp/127.0.0.1/$port"
    printf '%s %s HTTP/1.1\r\nHost: envoy\r\nConnection: close\r\nContent-Length: 0\r\n\r\n' "$1" "$2" >&3
    timeout 5 cat <&3
)
is_busy() { admin GET '/stats?filter=downstream_rq_active' | grep -E '^http\.(grpc|http)\.downstream_rq_active: [1-9]'; } > /dev/null

admin POST '/drain_listeners?graceful' > /dev/null || exit 0
while [ "$SECONDS" -lt "$end" ] && is_busy; do sleep 0.5; done
