#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs Tandem from this source tree, as wheels, into a new virtual environment: docker/install.sh VENV PART [EXTRA]
#
# PART: backend (with torch and the client), or gateway (the client alone, with what its gateway needs). EXTRA: an extra of
# the backend, such as server (a Triton server as a wheel, for machines without NVIDIA's image).
# TORCH_INDEX: the package index that has the torch wanted, a CPU or a CUDA build; else the default one.
# PYTHON: the Python to make the environment with, python3 by default. VENV gets no pip.
set -euo pipefail

venv=${1:?VENV is missing}
part=${2:?PART is missing: backend or gateway}
extra=${3:-}
python=${PYTHON:-python3}
cd "$(dirname "$0")/.."
case $part in backend | gateway) ;; *) echo "PART must be backend or gateway, got $part" >&2; exit 2 ;; esac
if [ -e "$venv" ]; then
    echo "$venv is there already; VENV must be new" >&2
    exit 2
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/build"
pip() { "$work/build/bin/python" -m pip --disable-pip-version-check --no-cache-dir --quiet "$@"; }

# torch brings the Triton language that fits it.
grep -v '^triton==' constraints.txt > "$work/constraints.txt"
pip install -c "$work/constraints.txt" hatchling ziglang

folders=(./client)
[ "$part" = gateway ] || folders+=(.)
pip wheel --no-deps --no-build-isolation --wheel-dir "$work/wheels" "${folders[@]}"

"$python" -m venv --without-pip "$venv"
into() { pip --python "$venv/bin/python" install -c "$work/constraints.txt" "$@"; }
wheels=("$work"/wheels/tandem_client-*.whl)
if [ "$part" = gateway ]; then
    wheels[0]+="[gateway]"
else
    into ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' constraints.txt)"
    wheels+=("$work"/wheels/tandem_backend-*.whl)
    wheels[1]+=${extra:+"[$extra]"}
fi
into "${wheels[@]}"
"$venv/bin/tandem" --version
