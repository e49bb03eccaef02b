# SPDX-License-Identifier: Apache-2.0
"""The disk cache: a restart resumes from it bit for bit, and nothing but a whole file of its own is read as state."""

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path

import pytest
import torch
from cold_state import ColdStates, tokens
from engine_driver import EngineDriver, Plain, Result, engine_config, limit_blocks, num_different
from safetensors import safe_open
from session_requests import start, turn
from tandem_backend.config import MIB
from tandem_backend.engine.cache import anchor_file, disk_files
from tandem_backend.engine.cache.anchor import Anchor
from tandem_backend.engine.cache.disk_tier import DiskTier
from tandem_backend.engine.cache.spill import Spill
from tandem_backend.engine.drafters.base import Drafter
from tandem_backend.errors import ConfigError
from tandem_backend.types import CacheCounters, Prompt, Request, SamplingParams

MAX_LEN = 640
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
LONG = tuple(tokens(1, 150))
TOKENS = torch.tensor([1, 2, 3], dtype=torch.int32)


@pytest.fixture(scope="module")
def cold(hybrid: Path) -> ColdStates:
    return ColdStates(hybrid, MAX_LEN, num_rows=64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def launch(
    checkpoint: Path, folder: Path, extra_drafters: Mapping[str, Drafter] | None = None, **overrides: object
) -> EngineDriver:
    values = {"drafters": ("lookup", "mtp"), "router": "always", "max_sessions": 4, "anchor_grid": 40, **overrides}
    return EngineDriver(engine_config(checkpoint, disk_cache=folder, **values), extra_drafters, poison=True)


IDS: Iterator[str] = (f"request {n}" for n in count())


def ask(driver: EngineDriver, token_ids: object, params: SamplingParams = PARAMS, salt: str = "") -> Result:
    prompt = Prompt(token_ids=tuple(token_ids))  # type: ignore[arg-type]
    return driver.run(Request(request_id=next(IDS), prompt=prompt, params=params, cache_salt=salt))


def num_cached(result: Result) -> int:
    assert result.stats is not None
    return result.stats.num_cached_tokens


def tier(driver: EngineDriver) -> DiskTier:
    return spill(driver).tier


def spill(driver: EngineDriver) -> Spill:
    assert driver.engine.spill is not None
    return driver.engine.spill


def disk_counters(driver: EngineDriver) -> CacheCounters:
    return driver.engine.counters().caches["disk"]


def last_anchor(driver: EngineDriver) -> Anchor:
    return max(driver.engine.scheduler.cache.anchors(), key=lambda anchor: anchor.position)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def fill(checkpoint: Path, folder: Path, text: tuple[int, ...] = LONG, **overrides: object) -> None:
    driver = launch(checkpoint, folder, **overrides)
    ask(driver, text)
    driver.engine.close()


def test_a_restart_resumes_to_the_bit(hybrid: Path, folder: Path, plain: Plain, cold: ColdStates) -> None:
    driver = launch(hybrid, folder)
    first = ask(driver, LONG)
    driver.engine.close()
    driver = launch(hybrid, folder)
    text = (*LONG, *first.token_ids, 5, 6)
    result = ask(driver, text)
    assert num_cached(result) == len(LONG) + 7  # the answer's last token was not computed
    assert num_different(result, plain.run(text, PARAMS)) == 0
    assert cold.num_wrong_anchors(driver.engine) == 0
    # In the middle too, at an anchor of the grid.
    other = launch(hybrid, folder)
    text = (*LONG[:100], *tokens(2, 9))
    result = ask(other, text)
    assert num_cached(result) == 80
    assert num_different(result, plain.run(text, PARAMS)) == 0
    assert cold.num_wrong_anchors(other.engine) == 0
    assert disk_counters(other) == CacheCounters(num_hits=1, num_saved_tokens=80)


def test_drafts_go_on_as_well(hybrid: Path, folder: Path, plain: Plain) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True, drafter="mtp")
    fill(hybrid, folder)
    driver = launch(hybrid, folder)
    result = ask(driver, LONG, params)
    assert num_cached(result) == len(LONG) - 1
    assert num_different(result, plain.run(LONG, params)) == 0
    cold_result = ask(launch(hybrid, folder.parent / "empty"), LONG, params)
    assert result.stats is not None
    assert cold_result.stats is not None
    assert result.stats.num_accepted_tokens == cold_result.stats.num_accepted_tokens


def test_what_was_evicted_comes_back(hybrid: Path, folder: Path, plain: Plain, cold: ColdStates) -> None:
    driver = launch(hybrid, folder, prefix_cache_bytes=300_000)
    texts = [tuple(tokens(seed, 100)) for seed in range(6)]
    for text in texts:
        ask(driver, text)
    assert tier(driver).settle(60)
    result = ask(driver, texts[0])
    assert num_cached(result) == 99
    assert num_different(result, plain.run(texts[0], PARAMS)) == 0
    assert disk_counters(driver).num_hits == 1
    assert cold.num_wrong_anchors(driver.engine) == 0


def test_memory_and_disk_make_one_prefix(hybrid: Path, folder: Path, plain: Plain, cold: ColdStates) -> None:
    """What memory has of a prefix is not read: the last file's rows are laid behind it, in the midst of a block."""
    fill(hybrid, folder)
    driver = launch(hybrid, folder)
    ask(driver, (*LONG[:81], 30))
    read = []
    whole = tier(driver).files.read
    tier(driver).files.read = lambda entry: read.append(entry.header.position) or whole(entry)  # type: ignore[method-assign,func-returns-value]
    result = ask(driver, LONG)
    assert read == [120, 149]
    assert num_cached(result) == 149
    assert num_different(result, plain.run(LONG, PARAMS)) == 0
    assert cold.num_wrong_anchors(driver.engine) == 0


def test_what_others_share_is_not_written_over(hybrid: Path, folder: Path, plain: Plain) -> None:
    """A file without rows for the mtp drafter begins where a block of memory ends that has them."""
    without, with_mtp = SamplingParams(max_tokens=8, drafter="none"), SamplingParams(max_tokens=8, drafter="mtp")
    driver = launch(hybrid, folder, anchor_grid=64)
    ask(driver, LONG, without)
    driver.engine.close()
    driver = launch(hybrid, folder, anchor_grid=64)
    ask(driver, LONG[:70], with_mtp)
    assert num_cached(ask(driver, LONG, without)) == 149
    text = (*LONG[:69], *tokens(9, 20))
    result = ask(driver, text, with_mtp)
    assert num_cached(result) == 69
    assert num_different(result, plain.run(text, with_mtp)) == 0


def test_each_file_brings_only_what_the_one_before_has_not(hybrid: Path, folder: Path) -> None:
    fill(hybrid, folder)
    headers = sorted((anchor_file.read_header(path)[0] for path in files(folder)), key=lambda h: h.position)
    assert [(h.start, h.position) for h in headers] == [(0, 40), (40, 80), (80, 120), (120, 149), (149, 157)]
    for path in files(folder):
        header = anchor_file.read_header(path)[0]
        with safe_open(path, framework="pt") as file:  # type: ignore[no-untyped-call]
            assert file.get_tensor("token_ids").tolist()[:140] == list(LONG[: header.position])[:140]
            assert len(file.get_tensor("keys.0")) == header.position - header.first_row


def test_sessions_and_running_requests_are_flushed(hybrid: Path, folder: Path, plain: Plain) -> None:
    driver = launch(hybrid, folder, prefix_cache_bytes=MIB)
    first = driver.run(start("1", LONG))
    second = driver.run(turn("2", (7, 8)))
    running = tuple(tokens(3, 70))
    driver.add(Request(request_id="runs", prompt=Prompt(token_ids=running), params=PARAMS))
    driver.step()
    driver.engine.close()
    driver = launch(hybrid, folder)
    text = (*LONG, *first.token_ids, 7, 8, *second.token_ids, 9)
    result = ask(driver, text)
    assert num_cached(result) == len(text) - 2
    assert num_different(result, plain.run(text, PARAMS)) == 0
    assert num_cached(ask(driver, running)) == len(running) - 1


def test_a_drained_engine_lets_another_have_its_prefixes(hybrid: Path, folder: Path, plain: Plain) -> None:
    drained = launch(hybrid, folder)
    ask(drained, LONG)
    drained.engine.flush(10)
    result = ask(launch(hybrid, folder), LONG)
    assert num_cached(result) == len(LONG) - 1
    assert num_different(result, plain.run(LONG, PARAMS)) == 0
    assert num_different(ask(drained, LONG), plain.run(LONG, PARAMS)) == 0  # it goes on, should it have to
    drained.engine.close()


def test_a_model_without_recurrent_layers_resumes_as_well(small_draft_model: Path, folder: Path) -> None:
    fill(small_draft_model, folder, drafters=())
    driver = launch(small_draft_model, folder, drafters=())
    result = ask(driver, LONG)
    assert num_cached(result) == len(LONG) - 1
    assert num_different(result, Plain(small_draft_model).run(LONG, PARAMS)) == 0


def test_tenants_are_kept_apart_on_disk(hybrid: Path, folder: Path) -> None:
    driver = launch(hybrid, folder)
    ask(driver, LONG, salt="a")
    driver.engine.close()
    driver = launch(hybrid, folder)
    assert num_cached(ask(driver, LONG, salt="b")) == 0
    assert num_cached(ask(driver, LONG)) == 0
    assert num_cached(ask(driver, LONG, salt="a")) == len(LONG) - 1
    assert not any(b'"a"' in path.read_bytes() for path in files(folder))


def test_prompt_logprobs_are_computed(hybrid: Path, folder: Path) -> None:
    fill(hybrid, folder)
    params = SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    assert num_cached(ask(launch(hybrid, folder), LONG, params)) == 0


def test_files_are_the_owners_alone(hybrid: Path, folder: Path) -> None:
    folder.mkdir(mode=0o755)
    fill(hybrid, folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def flip_a_bit_of(place: float) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(place * (len(content) - 1))] ^= 1
        path.write_bytes(content)

    return flip


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def say_something_else(path: Path) -> None:
    path.write_text("What stands here is no state at all. " * 9)


def make_a_huge_header(path: Path) -> None:
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


HEADER_DAMAGES = [flip_a_bit_of(0), flip_a_bit_of(0.001), truncate, empty, say_something_else, make_a_huge_header]
DAMAGES = [flip_a_bit_of(0.05), flip_a_bit_of(0.5), flip_a_bit_of(1)]


@pytest.mark.parametrize(
    ("damage", "is_running"),
    [
        *((damage, False) for damage in (*HEADER_DAMAGES, *DAMAGES)),
        *((damage, True) for damage in (truncate, *DAMAGES)),
    ],
)
def test_damaged_files_are_never_read_as_state(
    hybrid: Path,
    folder: Path,
    plain: Plain,
    damage: Callable[[Path], None],
    is_running: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fill(hybrid, folder)
    driver = launch(hybrid, folder) if is_running else None
    damaged = max(files(folder), key=lambda path: anchor_file.read_header(path)[0].position == 120)
    damage(damaged)
    driver = driver or launch(hybrid, folder)
    result = ask(driver, LONG)
    assert num_cached(result) == 80  # up to the file before
    assert num_different(result, plain.run(LONG, PARAMS)) == 0
    assert not damaged.exists()
    assert f"{damaged}: not read as state" in caplog.text
    assert tier(driver).statistics()["disk_cache_bad_files_total"] == 1
    driver.engine.close()
    assert num_cached(ask(launch(hybrid, folder), LONG)) == len(LONG) - 1  # written anew


def test_a_file_under_another_name_is_not_read(hybrid: Path, folder: Path, plain: Plain) -> None:
    """Tokens are compared one by one: a name, which is a hash, only says where to look."""
    other = tuple(tokens(5, 150))
    fill(hybrid, folder, other)
    wrong = {anchor_file.read_header(path)[0].position: path.read_bytes() for path in files(folder)}
    shutil.rmtree(folder)
    fill(hybrid, folder)
    for path in files(folder):
        if (position := anchor_file.read_header(path)[0].position) == 40:
            path.write_bytes(wrong[position])
    driver = launch(hybrid, folder)
    result = ask(driver, LONG)
    assert num_cached(result) == 0
    assert num_different(result, plain.run(LONG, PARAMS)) == 0


def test_a_file_that_is_written_anew_while_it_is_looked_up_is_read(hybrid: Path, folder: Path, plain: Plain) -> None:
    """First without rows for the mtp drafter, then with them: the index still tells of the first."""
    fill(hybrid, folder, anchor_grid=0)
    whole = {path: path.read_bytes() for path in files(folder)}
    shutil.rmtree(folder)
    driver = launch(hybrid, folder, anchor_grid=0)
    ask(driver, LONG, SamplingParams(max_tokens=8, ignore_eos=True, drafter="none"))
    driver.engine.close()
    driver = launch(hybrid, folder, anchor_grid=0)
    assert files(folder) == list(whole)
    for path, content in whole.items():
        assert path.read_bytes() != content
        path.write_bytes(content)
    result = ask(driver, LONG, SamplingParams(max_tokens=8, ignore_eos=True, drafter="none"))
    assert num_cached(result) == len(LONG) - 1
    assert num_different(result, plain.run(LONG, PARAMS)) == 0
    assert tier(driver).statistics()["disk_cache_bad_files_total"] == 0
    assert files(folder) == list(whole)


def test_files_of_other_weights_are_removed_by_the_owner_alone(hybrid: Path, folder: Path, tmp_path: Path) -> None:
    fill(hybrid, folder)
    foreign = files(folder)
    (folder / "notes.txt").write_text("not ours")
    copy = shutil.copytree(hybrid, tmp_path / "copy")
    content = bytearray((copy / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (copy / "model.safetensors").write_bytes(content)
    own = disk_files.DiskFiles(folder, "somebody", max_bytes=MIB, ttl_s=9, clock=lambda: 0.0)
    foreign = [path for path in foreign if not path.exists()]
    assert foreign
    own.close()
    fill(hybrid, folder)
    kept = files(folder)
    holder = launch(hybrid, folder)
    driver = launch(copy, folder)  # another one owns the directory
    assert num_cached(ask(driver, LONG)) == 0
    assert files(folder) == kept
    holder.engine.close()
    assert num_cached(ask(launch(copy, folder), LONG)) == 0
    assert not files(folder)
    assert (folder / "notes.txt").read_text() == "not ours"


def test_other_settings_are_foreign(hybrid: Path, folder: Path) -> None:
    fill(hybrid, folder)
    assert num_cached(ask(launch(hybrid, folder, drafters=()), LONG)) == 0  # no rows for the mtp drafter
    assert not files(folder)


def test_two_servers_on_one_directory(hybrid: Path, folder: Path, plain: Plain) -> None:
    fill(hybrid, folder)
    first, second = launch(hybrid, folder), launch(hybrid, folder)
    assert (tier(first).files.is_owner, tier(second).files.is_owner) == (True, False)
    for driver in (first, second):
        result = ask(driver, LONG)
        assert num_cached(result) == len(LONG) - 1
        assert num_different(result, plain.run(LONG, PARAMS)) == 0
    # What the owner removes the other one misses, and computes.
    assert first.engine.clear_caches()["disk"] == 5
    second.engine.scheduler.cache.clear()
    assert num_cached(ask(second, LONG)) == 0
    other = tuple(tokens(6, 60))
    ask(second, other)
    first.engine.close()
    tier(second)._take_care()
    assert tier(second).files.is_owner
    second.engine.close()
    assert num_cached(ask(launch(hybrid, folder), other)) == len(other) - 1


def test_one_server_reads_what_the_other_has_written_meanwhile(hybrid: Path, folder: Path, plain: Plain) -> None:
    first, second = launch(hybrid, folder), launch(hybrid, folder)
    ask(first, LONG)
    for anchor in first.engine.scheduler.cache.anchors():
        spill(first).keep(anchor)
    assert tier(first).settle(10)
    assert tier(second).files.num_files == 0
    tier(second)._take_care()
    assert not tier(second).files.is_owner
    result = ask(second, LONG)
    assert num_cached(result) == len(LONG) - 1
    assert num_different(result, plain.run(LONG, PARAMS)) == 0


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[4:]
import test_disk_cache as t
driver = t.launch(Path(sys.argv[1]), Path(sys.argv[2]))
t.ask(driver, t.LONG)
fsync, calls = os.fsync, iter(range(99))
def die(descriptor):
    if next(calls) == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(descriptor)
os.fsync = die
driver.engine.close()
"""


@pytest.mark.parametrize("num_syncs", [5, 6])
def test_a_killed_flush_leaves_whole_files_alone(hybrid: Path, folder: Path, plain: Plain, num_syncs: int) -> None:
    """Two syncs a file, of itself before it has its name, and of the directory: killed before and within the fourth."""
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    killed = subprocess.run([sys.executable, "-c", KILLED, hybrid, folder, str(num_syncs), *paths], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(files(folder)) == 3
    assert len(list(folder.glob("*.tmp"))) == num_syncs - 5
    driver = launch(hybrid, folder)
    assert not list(folder.glob("*.tmp"))
    result = ask(driver, LONG)
    assert num_cached(result) == 120
    assert num_different(result, plain.run(LONG, PARAMS)) == 0


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 200 KB, where this user may mount one."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_costs_the_cache_alone(hybrid: Path, small_disk: Path, plain: Plain) -> None:
    driver = launch(hybrid, small_disk, prefix_cache_bytes=300_000)
    texts = [tuple(tokens(seed, 100)) for seed in range(8)]
    for text in (*texts, *texts):
        assert num_different(ask(driver, text), plain.run(text, PARAMS)) == 0
    driver.engine.close()
    assert tier(driver).statistics()["disk_cache_write_errors_total"] > 0
    assert not list(small_disk.glob("*.tmp"))
    driver = launch(hybrid, small_disk, prefix_cache_bytes=300_000)
    assert tier(driver).files.num_files > 0
    for text in texts:
        assert num_different(ask(driver, text), plain.run(text, PARAMS)) == 0


def test_a_disk_that_fails_costs_the_cache_alone(
    hybrid: Path, folder: Path, plain: Plain, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    driver = launch(hybrid, folder)
    assert num_different(ask(driver, LONG), plain.run(LONG, PARAMS)) == 0
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        spill(driver).keep(last_anchor(driver))
        assert tier(driver).settle(60)
    assert list(folder.iterdir()) == [folder / "lock"]
    assert (tier(driver).num_failed, tier(driver).num_dropped) == (1, 4)  # the first one, and those behind it
    assert caplog.text.count("the disk cache can't be written") == 1
    driver.engine.close()  # by now it can be
    assert num_cached(ask(launch(hybrid, folder), LONG)) == len(LONG) - 1


def test_a_read_only_directory_is_only_read(hybrid: Path, folder: Path, plain: Plain) -> None:
    fill(hybrid, folder)
    kept = files(folder)
    mounted = subprocess.run(["mount", "--bind", "-o", "ro", folder, folder], capture_output=True)
    if mounted.returncode:
        folder.chmod(0o500)  # enough for whoever isn't root
        if os.geteuid() == 0:
            pytest.skip("root writes everywhere, and nothing can be mounted read-only")
    try:
        driver = launch(hybrid, folder)
        assert not tier(driver).files.is_owner
        result = ask(driver, LONG)
        assert num_cached(result) == len(LONG) - 1
        assert num_different(result, plain.run(LONG, PARAMS)) == 0
        ask(driver, tokens(7, 90))
        driver.engine.close()
        assert files(folder) == kept
    finally:
        if not mounted.returncode:
            subprocess.run(["umount", "--lazy", folder], check=True)


def test_the_cap_holds_and_the_least_recently_used_go(hybrid: Path, folder: Path, plain: Plain) -> None:
    driver = launch(hybrid, folder, disk_cache_bytes=MIB, prefix_cache_bytes=300_000, kv_cache_bytes=4 * MIB)
    texts = [tuple(tokens(seed, 120)) for seed in range(24)]
    for text in texts:
        ask(driver, text)
        assert tier(driver).settle(60)
        assert sum(path.stat().st_size for path in files(folder)) <= MIB
    driver.engine.close()
    assert disk_counters(driver).num_evictions > 0
    driver = launch(hybrid, folder, disk_cache_bytes=MIB)
    assert [num_cached(ask(driver, text)) for text in (texts[0], texts[-1])] == [0, 119]


def test_files_are_removed_when_their_time_is_over(tmp_path: Path) -> None:
    now = [1000.0]
    found = disk_files.DiskFiles(tmp_path, "f", max_bytes=MIB, ttl_s=60, clock=lambda: now[0])
    disk = DiskTier(found, "f")
    digest = disk.digests("", [1, 2, 3], [3])[3]
    found.write(digest, disk.header("", 3, (0, ""), 0, has_hidden=False), {"token_ids": TOKENS})
    now[0] += 50
    chain = disk.chain("", [1, 2, 3], 3)
    assert len(chain) == 1
    found.touch(chain)
    now[0] += 50
    assert disk.chain("", [1, 2, 3], 3) == chain
    now[0] += 11
    assert disk.chain("", [1, 2, 3], 3) == []
    found.expire()
    assert not files(tmp_path)
    disk.close()


def test_a_disk_that_hangs_holds_up_nobody(hybrid: Path, folder: Path, plain: Plain) -> None:
    driver = launch(hybrid, folder, prefix_cache_bytes=300_000)
    disk = tier(driver)
    disk._max_pending_bytes = 200_000
    go_on = disk_files.threading.Event()
    whole = disk.files.write
    disk.files.write = lambda *args: (go_on.wait(), whole(*args))[1]  # type: ignore[method-assign]
    for seed in range(12):
        text = tuple(tokens(seed, 100))
        assert num_different(ask(driver, text), plain.run(text, PARAMS)) == 0
    assert disk.num_dropped > 0
    assert 0 < disk.statistics()["disk_cache_pending_bytes"] <= 200_000
    driver.engine.close(0.2)  # gives up
    go_on.set()
    disk._writer.join(60)
    assert not disk._writer.is_alive()


def test_clearing_forgets_what_waits_too(hybrid: Path, folder: Path) -> None:
    driver = launch(hybrid, folder)
    ask(driver, LONG)
    disk = tier(driver)
    go_on = disk_files.threading.Event()
    whole = disk.files.write
    disk.files.write = lambda *args: (go_on.wait(), whole(*args))[1]  # type: ignore[method-assign]
    spill(driver).keep(last_anchor(driver))
    assert driver.engine.clear_caches() == {"prefix": 5, "response": 0, "disk": 5}
    go_on.set()
    assert disk.settle(60)
    assert not files(folder)
    assert num_cached(ask(driver, LONG)) == 0


def test_little_memory_is_enough(hybrid: Path, folder: Path, plain: Plain) -> None:
    """A prefix for which there are too few blocks is computed."""
    fill(hybrid, folder)
    driver = launch(hybrid, folder, max_context_len=256)
    limit_blocks(driver.engine, 4)
    text = (*LONG, *tokens(8, 60))
    result = ask(driver, text)
    assert num_different(result, plain.run(text, PARAMS)) == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prefix_cache_bytes": 0}, "disk_cache: needs prefix_cache_bytes"),
        ({"disk_cache": Path("/proc/no/such")}, "disk_cache: /proc/no/such"),
    ],
)
def test_a_directory_that_can_not_be_used_is_named(
    hybrid: Path, folder: Path, values: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineDriver(engine_config(hybrid, **{"disk_cache": folder, **values}))
    folder.write_text("a file")
    with pytest.raises(ConfigError, match="disk_cache"):
        launch(hybrid, folder)


def test_it_is_off_by_default(hybrid: Path) -> None:
    driver = EngineDriver(engine_config(hybrid))
    assert driver.engine.spill is None
    assert "disk" not in driver.engine.counters().caches
    assert "disk" not in driver.engine.clear_caches()
