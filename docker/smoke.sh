#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Does a deployment work? Starts it, waits until it is ready, streams an answer, cancels one, unloads the models, stops it.
# The exit status is the result: 0, or 1 with the step that failed on stderr.
#
#   docker/smoke.sh                      docker compose with the profile of docker/.env (cpu, the default, or gpu), built anew
#   docker/smoke.sh tandem serve ...     any command that runs a server in the foreground, without Docker
#
# SMOKE_HTTP, SMOKE_METRICS: where it listens. SMOKE_READY_S: seconds until it must be ready.
# TANDEM_REPOSITORY_KEY: the key for unloading; a new one is made where it is missing.
set -euo pipefail

folder=$(realpath "$(dirname "$0")")
if [ "$#" -eq 0 ] && [ -f "$folder/.env" ]; then
    set -a
    # shellcheck disable=SC1091
    . "$folder/.env"
    set +a
fi
export COMPOSE_PROFILES=${COMPOSE_PROFILES:-cpu}
export TANDEM_REPOSITORY_KEY=${TANDEM_REPOSITORY_KEY:-smoke-$RANDOM-$RANDOM-$RANDOM-$RANDOM}
http=${SMOKE_HTTP:-127.0.0.1:${HTTP_PORT:-8000}}
metrics=${SMOKE_METRICS:-127.0.0.1:${METRICS_PORT:-8002}}
ready_s=${SMOKE_READY_S:-900}
generate=http://$http/v2/models/tandem_generate
work=$(mktemp -d)
server=

compose() { docker compose --project-directory "$folder" --file "$folder/compose.yaml" "$@"; }
fail() { echo "smoke: $step: $1" >&2; exit 1; }
say() { step=$1; echo "smoke: $step"; }

# metric NAME [LABEL="VALUE"]: its value, 0 where there is none.
metric() {
    curl -fsS --max-time 10 "http://$metrics/metrics" | awk -v name="$1{" -v label="${2:-}" \
        'index($0, name) == 1 && index($0, label) { value = $NF } END { printf "%d\n", value }'
}

# within SECONDS COMMAND...: until the command succeeds.
within() {
    local end=$((SECONDS + $1))
    shift
    until "$@"; do
        if [ "$SECONDS" -ge "$end" ]; then return 1; fi
        if [ -n "$server" ] && ! kill -0 "$server" 2> /dev/null; then fail "the server has exited"; fi
        sleep 0.2
    done
}

status() { curl -s -o /dev/null -w '%{http_code}' --max-time 30 "$@" || true; }
is_ready() { [ "$(status "$generate/ready")" = 200 ] && [ "$(status "http://$http/v2/models/tandem/ready")" = 200 ]; }
has_metrics() { [ "$(status "http://$metrics/metrics")" = 200 ]; }
is_idle() { [ "$(metric tandem_num_active)" = 0 ] && [ "$(metric tandem_num_queued)" = 0 ]; }
is_cancelled() { [ "$(metric tandem_requests_total 'outcome="cancelled"')" -gt "$before" ] && is_idle; }
has_begun() { grep -q '^data: ' "$work/cancelled"; }
is_unloaded() { [ "$(status "http://$http/v2/models/$model/ready")" != 200 ]; }
unload() { status -X POST "$@" "http://$http/v2/repository/models/$model/unload"; }

start() {
    if [ "$#" -eq 0 ]; then
        compose up --build --detach
    else
        "$@" &
        server=$!
    fi
}

# Also after a failed step; the server's own exit status counts where it was started here.
stop() {
    local code=0
    if [ -n "$server" ]; then
        kill -TERM "$server" 2> /dev/null || true
        wait "$server" || code=$?
        server=
    elif [ -n "${composed:-}" ]; then
        composed=
        compose down || code=$?
    fi
    return "$code"
}
trap 'stop || true; rm -rf "$work"' EXIT

say start
if [ "$#" -eq 0 ]; then
    [[ $COMPOSE_PROFILES =~ ^(cpu|gpu)$ ]] || fail "COMPOSE_PROFILES must be cpu or gpu, got $COMPOSE_PROFILES"
    composed=yes
fi
[ "$(status "http://$http/v2/health/live")" = 000 ] || fail "something answers at $http already"
start "$@" || fail "it did not start"

say ready
within "$ready_s" is_ready || fail "not ready after $ready_s s"
within 30 has_metrics || fail "no metrics at $metrics"

say stream
body='{"text_input": "def read_lines(path):\n", "stream": true, "max_tokens": 32, "return_finish_reason": true}'
curl -fsSN --max-time 120 "$generate/generate_stream" -d "$body" > "$work/stream" || fail "the request failed"
[ "$(grep -c '^data: ' "$work/stream")" -ge 2 ] || fail "it came in one piece: $(cat "$work/stream")"
! grep -q '"error"' "$work/stream" || fail "$(grep '"error"' "$work/stream")"
grep '^data: ' "$work/stream" | tail -n 1 | grep -qE '"finish_reason":"(stop|length)"' || fail "no end: $(tail -n 2 "$work/stream")"

say cancel
before=$(metric tandem_requests_total 'outcome="cancelled"')
body='{"text_input": "import ", "stream": true, "max_tokens": 4000, "ignore_eos": true}'
curl -sN --max-time 120 "$generate/generate_stream" -d "$body" > "$work/cancelled" &
client=$!
within 60 has_begun || fail "the answer did not begin"
kill "$client"
wait "$client" 2> /dev/null || true
within 30 is_cancelled || fail "the request still runs"

if [ -n "${SMOKE_GATEWAY:-${composed:+127.0.0.1:${GATEWAY_PORT:-9000}}}" ]; then
    gateway=${SMOKE_GATEWAY:-127.0.0.1:${GATEWAY_PORT:-9000}}
    say gateway
    is_served() { [ "$(status "http://$gateway/health")" = 200 ]; }
    within 120 is_served || fail "no answer at $gateway/health"
    body='{"model": "tandem", "max_tokens": 8, "messages": [{"role": "user", "content": "What is a tuple?"}]}'
    curl -fsS --max-time 120 -H 'content-type: application/json' "http://$gateway/v1/chat/completions" -d "$body" \
        | grep -q '"finish_reason"' || fail "no answer"
fi

say unload
for model in tandem_generate tandem; do
    code=$(unload)
    [ "$code" = 403 ] || fail "$model can be unloaded without the key: status $code"
    code=$(unload -H "tandem-model-repository-key: $TANDEM_REPOSITORY_KEY")
    [ "$code" = 200 ] || fail "$model: status $code"
    within 30 is_unloaded || fail "$model is still ready"
done

say stop
stop || fail "exit status $?"
echo "smoke: passed"
