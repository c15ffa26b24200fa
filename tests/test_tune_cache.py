"""The choices that tune remembers: their file, its faults, and explain."""

from __future__ import annotations

import json
import os
import threading
import warnings

import pytest
import torch

import torchweld
import torchweld._library as library
from choices_helpers import (  # noqa: F401
    GPU,
    LINEAR,
    explains_kernels,
    nothing_is_left_behind,
    ops,
    picked,
    problem,
)
from commands import python
from samples import BF16
from torchweld.tuning import cache

TILE = "sync 128x64 /3"


@pytest.fixture
def remembers(monkeypatch):
    """Behaves as a build with CUDA kernels."""
    monkeypatch.setattr(library, "build_facts", lambda: {"cuda": "13.0"})


def an_entry(**changes):
    made = cache.entry("linear", GPU, "bfloat16", "matmul", LINEAR, TILE, 12.5)
    return {**made, **changes}


def write(*entries, **whole):
    cache.path().parent.mkdir(exist_ok=True)
    cache.path().write_text(json.dumps({"format": 2, "entries": list(entries), **whole}))


def loaded(expected_warnings: int) -> tuple[str, str]:
    """The test matmul's choice after reading the file as a new process does."""
    ops._forget_choices()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache.load()
    texts = [str(w.message) for w in caught]
    assert len(texts) == expected_warnings, texts
    assert all(str(cache.path()) in text for text in texts)
    return picked(gpu=GPU)


@pytest.mark.parametrize(
    "changes", [{"gpu": "NVIDIA Other"}, {"version": "0.0.9"}], ids=["gpu", "version"]
)
def test_entries_of_others_wait_for_them(remembers, changes):
    write(an_entry(**changes))
    assert loaded(0)[1] == "heuristic"
    cache.remember([an_entry()])
    assert len(cache.read()) == 2, "they stay in the file"


DAMAGED = {
    "empty": b"",
    "truncated": b'{"format": 2, "entries": [{"op": "lin',
    "garbage": bytes(range(256)),
    "not utf-8": b'{"format": 2, "entries": ["\xff\xfe"]}',
    "huge": b'{"format": 2, "entries": [' + b" " * (5 << 20) + b"]}",
    "deep": b'{"format": 2, "entries": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "a list": b"[1, 2]",
    "no entries": b'{"format": 2}',
    "another format": b'{"format": 3, "entries": []}',
    "entries of text": b'{"format": 2, "entries": "x"}',
    "too many": b'{"format": 2, "entries": [' + b"0," * 5000 + b"0]}",
    "a big number": b'{"format": 2, "entries": [' + b"9" * 5000 + b"]}",
}


def test_a_file_of_numbers_is_ignored(remembers):
    """An entry in the format of versions whose choices had no names."""
    write(an_entry(choice=[2, 3]), format=1)
    assert loaded(1)[1] == "heuristic"
    cache.remember([an_entry()])
    assert len(cache.read()) == 1 and loaded(0) == (TILE, "tuned")


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_ignored_with_one_warning(remembers, name):
    cache.path().parent.mkdir()
    cache.path().write_bytes(DAMAGED[name])
    assert loaded(1)[1] == "heuristic"
    cache.remember([an_entry()])
    assert loaded(0) == (TILE, "tuned"), "the next tune mends it"


def test_what_is_no_regular_file_is_ignored(remembers):
    cache.path().parent.mkdir()
    os.mkfifo(cache.path())
    assert loaded(1)[1] == "heuristic"
    cache.path().unlink()
    cache.path().mkdir()
    assert loaded(1)[1] == "heuristic"
    cache.path().rmdir()
    cache.path().symlink_to("/dev/zero")
    assert loaded(1)[1] == "heuristic"


BAD_ENTRIES = {
    "no dict": [],
    "no op": an_entry(op=None),
    "another family": an_entry(family="gemm"),
    "another dtype": an_entry(dtype=7),
    "numbers as text": an_entry(problem={**an_entry()["problem"], "m": "1024"}),
    "a truth value": an_entry(problem={**an_entry()["problem"], "m": True}),
    "a fraction": an_entry(problem={**an_entry()["problem"], "m": 1024.0}),
    "too large": an_entry(problem={**an_entry()["problem"], "m": 2**63}),
    "no multiprocessors": an_entry(problem={**an_entry()["problem"], "sms": 0}),
    "a device of version 0.1": an_entry(
        problem={k: v for k, v in an_entry()["problem"].items() if k != "wgmma"}
    ),
    "sizes missing": an_entry(problem={"m": 1024}),
    "another class": an_entry(shape_class={**an_entry()["shape_class"], "m": 512}),
    "no such tile": an_entry(choice="sync 96x64 /3"),
    "no such engine": an_entry(choice="sync90 128x64 /3"),
    "illegal splits": an_entry(choice="sync 128x64 /24"),
    "more parts than there are": an_entry(choice="sync 128x64 /99"),
    "no tile": an_entry(choice="sync"),
    "more than a name": an_entry(choice=TILE + " "),
    "an empty choice": an_entry(choice=""),
    "a long choice": an_entry(choice=TILE * 1000),
    "a choice of numbers": an_entry(choice=[0, 2, 3]),
    "a choice that is none": an_entry(choice=None),
    "a tile that has changed": an_entry(columns={**an_entry()["columns"], "block_m": 96}),
    "a tile of another": an_entry(choice="sync 64x64 /3"),
}


@pytest.mark.parametrize("name", BAD_ENTRIES)
def test_a_bad_entry_is_left_out_with_one_warning(remembers, name):
    numbers = problem("matmul", m=16)
    good = cache.entry("bmm", GPU, "bfloat16", "matmul", numbers, "sync 64x64", 1.0)
    write(BAD_ENTRIES[name], good, BAD_ENTRIES[name])
    assert loaded(1)[1] == "heuristic"
    assert picked(numbers=numbers, gpu=GPU) == ("sync 64x64", "tuned"), "the good one holds"


def test_a_folder_that_cannot_be_written(remembers, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="could not be written"):
        note = cache.remember([an_entry()])
    assert note == "the fastest is remembered in this process"
    assert picked(gpu=GPU) == (TILE, "tuned")


def test_a_failed_write_leaves_the_old_file(remembers, monkeypatch):
    cache.remember([an_entry()])
    before = cache.path().read_bytes()

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(RuntimeWarning, match="no space left"):
        cache.remember([an_entry(choice="sync 128x128")])
    assert cache.path().read_bytes() == before
    assert sorted(p.name for p in cache.path().parent.iterdir()) == ["tune.json", "tune.lock"]


def test_writers_do_not_lose_each_others_entries(remembers):
    def writer(thread: int) -> None:
        for i in range(5):
            numbers = problem("matmul", m=2 ** (thread + 1), n=8 * (i + 1))
            cache.remember(
                [cache.entry("bmm", GPU, "float16", "matmul", numbers, "sync 64x64", 1.0)]
            )

    threads = [threading.Thread(target=writer, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cache.read()) == 20
    assert cache.path().parent.stat().st_mode & 0o777 == 0o700


def test_path(monkeypatch, tmp_path):
    assert cache.path() == tmp_path / "torchweld" / "tune.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.path() == tmp_path / ".cache" / "torchweld" / "tune.json"


def test_a_fresh_process_reads_the_file_and_touches_no_gpu(tmp_path):
    if library.build_facts().get("cuda") is None:
        pytest.skip("a CPU-only build remembers nothing")
    write(an_entry())
    code = (
        "import torch, torchweld; print(torch.ops.torchweld._picked_choice"
        f"({GPU!r}, 'matmul', {LINEAR}), torch.cuda.is_initialized())"
    )
    for switch, expected in (("1", f"('{TILE}', 'tuned') False"), ("0", "'heuristic') False")):
        done = python("-c", code, TORCHWELD_TUNE=switch)
        assert done.stdout.strip().endswith(expected), done.stderr


@explains_kernels
def test_explain_names_the_file(monkeypatch):
    x = torch.empty(1024, 2048, dtype=BF16, device="meta")
    weight = torch.empty(2048, 2048, dtype=BF16, device="meta")
    assert torchweld.explain("linear", x, weight).source == "heuristic"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    ops._remember_choice(gpu, "matmul", problem("matmul"), "sync 64x64 /2")
    tuned = torchweld.explain("linear", x, weight)
    assert tuned.source == "tuned" and "torchweld.tune" in tuned.why
    assert tuned.tile["name"] == "sync 64x64 /2" and tuned.tile["splits"] == 2
    assert (tuned.tile["block_m"], tuned.tile["block_n"]) == (64, 64)
    assert f"source    tuned: {cache.path()}" in str(tuned)
    ops._force_choice("matmul", problem("matmul"), "sync 128x128")
    forced = torchweld.explain("linear", x, weight)
    ops._force_choice("matmul", problem("matmul"), "")
    assert forced.source == "forced" and forced.tile["name"] == "sync 128x128"
