# SPDX-License-Identifier: Apache-2.0
"""On a CUDA device (`make test-gpu`): launched or captured, any chunks and any tree have the bits of a plain walk."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fakes.bits import assert_same_bits
from fakes.tiny_model import tiny_checkpoint
from model_checks import MakePasses, check_any_schedule, check_tree, tokens
from model_driver import Driver, Rows
from tandem_backend.engine.library_linear import allow_library
from tandem_backend.model.batch import SequenceRows, build_batch
from tandem_backend.model.decoder import Decoder
from tandem_backend.model.graphs import CudaRecorder, GraphLimits, GraphPasses
from tandem_backend.model.passes import LaunchedPasses
from tandem_backend.model.state import ModelState, allocate_state

pytestmark = pytest.mark.gpu
BUNDLED = Path(__file__).parents[2] / "model_repository" / "tandem" / "1" / "tandem-pydoc"


def captured(decoder: Decoder, state: ModelState) -> GraphPasses:
    return GraphPasses(decoder, state, GraphLimits(128, 512, 60), CudaRecorder(decoder.device))


WAYS: dict[str, MakePasses] = {"launched": LaunchedPasses, "captured": captured}


@pytest.fixture(scope="module", params=["qwen3_5_text", "qwen3_next", "llama", "bundled"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    checkpoint = BUNDLED
    if request.param != "bundled":
        checkpoint = tiny_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    return Decoder(checkpoint, torch.device("cuda", 0))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("prompt_lens", [[1, 40, 17], [90, 130, 5, 64]])
def test_any_chunks_any_company_any_order(decoder: Decoder, way: str, prompt_lens: list[int]) -> None:
    check_any_schedule(decoder, random.Random(0), prompt_lens, 64, WAYS[way])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("prefix_len", "num_nodes"), [(0, 7), (61, 12), (250, 48), (300, 64)])
def test_a_tree_equals_the_walk_of_its_paths(decoder: Decoder, way: str, prefix_len: int, num_nodes: int) -> None:
    check_tree(decoder, random.Random(prefix_len), prefix_len, num_nodes, 64, WAYS[way])


def test_a_graph_has_the_bits_of_launched_ops(decoder: Decoder) -> None:
    """Whole passes over several sequences, their state after commit included."""
    rng = random.Random(7)
    launched, graphs = (Driver(decoder, 64, 400, 5, 1, way) for way in WAYS.values())
    for _ in range(25):
        counts = [rng.choice([1, 1, 2, 5, 30]) for _ in launched.sequences]
        chunks = [tokens(rng, decoder, count) for count in counts]
        expected, got = (
            torch.cat(driver.forward(*(Rows(seq, chunk) for seq, chunk in zip(driver.sequences, chunks, strict=True))))
            if max(seq.prefix_len for seq in driver.sequences) < 360
            else torch.zeros(1, 1)
            for driver in (launched, graphs)
        )
        assert_same_bits(got, expected)
    for mine, theirs in zip(launched.tensors(), graphs.tensors(), strict=True):
        assert_same_bits(mine.flatten(1), theirs.flatten(1))


def test_the_library_is_used_only_where_it_gives_the_same_bits(decoder: Decoder) -> None:
    state = allocate_state(decoder.config, 1, 1, device=decoder.device)
    batch = build_batch([SequenceRows(range(5, 133), 0, 0, [0], logit_rows=[127])])
    exact = decoder.forward(batch, state)
    try:
        allow_library(decoder, state, 128)
        assert_same_bits(decoder.forward(batch, state).logits, exact.logits)
    finally:
        for weight in decoder.packed_weights():
            weight.library_rows.clear()


def test_a_graph_keeps_what_it_reads() -> None:
    """Tensors of the recorded function alone are not freed for others to write over."""
    device = torch.device("cuda", 0)
    recorder, out = CudaRecorder(device), torch.zeros(1000, device=device)

    def record(numbers: torch.Tensor) -> Callable[[], None]:
        def run() -> None:
            out.copy_(numbers)

        return recorder.record(run)

    replay = record(torch.arange(1000.0, device=device))
    others = [torch.full((1000,), float("nan"), device=device) for _ in range(100)]
    replay()
    recorder.wait()
    assert torch.equal(out.cpu(), torch.arange(1000.0))
    assert len(others) == 100
