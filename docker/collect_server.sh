#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Copies a Triton server with its Python backend, and nothing else, to a new folder: collect_server.sh FROM TO
#
# The libraries that they link and the system does not have by itself go to TO/libraries, for the loader's configuration. The
# C library and libpython are the system's, the driver's libraries come with the device.
set -euo pipefail

from=$(realpath "${1:?FROM is missing, /opt/tritonserver say}")
to=${2:?TO is missing}
[ -x "$from/bin/tritonserver" ] || { echo "$from holds no bin/tritonserver" >&2; exit 1; }

mkdir -p "$to/bin" "$to/backends" "$to/libraries"
cp -a "$from/bin/tritonserver" "$to/bin/"
cp -a "$from/backends/python" "$to/backends/"
if [ -d "$from/lib" ]; then cp -a "$from/lib" "$to/"; fi
find "$from" -maxdepth 1 -type f \( -iname '*license*' -o -name TRITON_VERSION \) -exec cp -a {} "$to/" \;

system='^(ld-linux.*|lib(c|m|dl|rt|pthread|resolv|util|python3\.[0-9]+)\.so.*|lib(cuda|nvidia-.*)\.so.*)$'
find "$to" -type f \( -name '*.so*' -o -name tritonserver -o -name triton_python_backend_stub \) -print0 |
    while IFS= read -r -d '' binary; do ldd "${binary/#"$to"/"$from"}" 2> /dev/null || true; done |
    awk '$2 == "=>" && $3 ~ /^\// { print $1, $3 }' | sort -u |
    while read -r name path; do
        path=$(realpath "$path")
        case $path in "$from"/lib/* | "$from"/backends/*) continue ;; esac
        if ! [[ $name =~ $system ]]; then cp -L "$path" "$to/libraries/$name"; fi
        # DCGM opens its modules by name.
        if [[ $name == libdcgm.so* ]]; then cp -L "$(dirname "$path")"/libdcgm*.so* "$to/libraries/"; fi
    done
