# SPDX-License-Identifier: Apache-2.0
"""Loading holds the weights once."""

import subprocess
import sys
from pathlib import Path

BUNDLED = Path(__file__).parents[2] / "model_repository" / "tandem" / "1" / "tandem-pydoc"
ALLOWANCE = 16 * 2**20  # allocator, one layer's tensors on their way into the packed form, rope tables

# Anonymous memory only: mapped pages of the file are the kernel's to drop. The peak is sampled by a thread.
PROGRAM = """
import sys, threading
from pathlib import Path
from tandem_backend.model.decoder import Decoder

def anonymous_bytes():
    for line in open("/proc/self/status", encoding="utf-8"):
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024

def sample(done, peak):
    while not done.wait(0.001):
        peak[0] = max(peak[0], anonymous_bytes())

before = anonymous_bytes()
done, peak = threading.Event(), [before]
sampler = threading.Thread(target=sample, args=(done, peak))
sampler.start()
decoder = Decoder(Path(sys.argv[1]))
done.set()
sampler.join()
print(max(peak[0], anonymous_bytes()) - before, decoder.num_weight_bytes())
"""


def test_loading_does_not_double_memory() -> None:
    output = subprocess.run([sys.executable, "-c", PROGRAM, str(BUNDLED)], check=True, capture_output=True, text=True)
    growth, weight_bytes = (int(part) for part in output.stdout.split())
    assert growth >= 0.8 * weight_bytes  # what is measured is the loading
    assert growth < 1.3 * (BUNDLED / "model.safetensors").stat().st_size + ALLOWANCE
