# SPDX-License-Identifier: Apache-2.0
"""Made-up Triton server installations in the two layouts that the launcher knows."""

import sys
import textwrap
from pathlib import Path

THIS_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
STUB = "triton_python_backend_stub"

# Stands in for tritonserver: answers what the launcher asks, and has a child as the real one has stubs.
SERVER_SCRIPT = """
    import json, os, subprocess, sys, threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    options = dict(argument.lstrip("-").split("=", 1) for argument in sys.argv[1:] if "=" in argument)
    prefix = options["backend-config"].rsplit("=", 1)[1]
    open(f"/dev/shm/{prefix}region", "w").close()
    print("ARGS", json.dumps(sys.argv[1:]), flush=True)
    print("ENV", json.dumps(dict(os.environ)), flush=True)
    child = subprocess.Popen(["sleep", "300"])
    print("CHILD", child.pid, flush=True)

    class Handler(BaseHTTPRequestHandler):
        def _answer(self, body):
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        def do_GET(self):
            self._answer(b"")
        def do_POST(self):
            self._answer(json.dumps(MODELS).encode())
        def log_message(self, *args):
            pass

    servers = [HTTPServer(("127.0.0.1", int(options[port])), Handler) for port in ("http-port", "metrics-port")]
    threading.Thread(target=servers[1].serve_forever).start()
    servers[0].serve_forever()
"""
READY = 'MODELS = [{"name": "tandem", "version": "1", "state": "READY"}]'


def write_stub(path: Path, version: str = THIS_PYTHON) -> None:
    """A file that names the libpython it links, as the real stub does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x7fELF\0libpython%s.so.1.0\0" % version.encode())


def write_binary(root: Path, script: str) -> None:
    """tritonserver as a Python script."""
    binary = root / "bin" / "tritonserver"
    binary.parent.mkdir(parents=True, exist_ok=True)
    binary.write_text(f"#!{sys.executable}\n{textwrap.dedent(script)}")
    binary.chmod(0o755)


def make_container(root: Path) -> Path:
    """The container's layout in `root`; its server does nothing."""
    write_binary(root, "")
    write_stub(root / "backends" / "python" / STUB)
    (root / "backends" / "python" / "libtriton_python.so").touch()
    return root


def make_wheel(site_packages: Path) -> Path:
    """The wheel's layout, with a server that becomes ready."""
    root = site_packages / "pytriton" / "tritonserver"
    write_binary(root, READY + textwrap.dedent(SERVER_SCRIPT))
    (root / "backends" / "python").mkdir(parents=True)
    (root / "backends" / "python" / "libtriton_python.so").touch()
    for version in ("3.8", THIS_PYTHON):
        write_stub(root / "python_backend_stubs" / version / STUB, version)
    (site_packages / "nvidia_pytriton.libs").mkdir()
    return root
