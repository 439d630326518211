"""A sweep that was killed goes on where it stopped, and gives the same tables to the last bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from by_hand import corpus_of, deep, opened
from families import ids
from torch import Tensor, nn

from depthprobe.ablation import Ablations, ablate, default_schedules
from depthprobe.ablations import run as engine
from depthprobe.ablations.kinds import controls
from depthprobe.ablations.run import SweepSettings, sweep
from depthprobe.ablations.schedule import merge, skip
from depthprobe.errors import OutputError

BLOCKS, SEQUENCES, TOKENS = 5, 30, 24
TESTS = Path(__file__).parent

# Imports once, then runs the sweep in a process of its own for every line that it reads: its id, then how it ended.
SCRIPT = """
import os, sys
from pathlib import Path
from test_resume import started
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        try:
            started(Path(sys.argv[1])).table.to_pickle(sys.argv[2])
            os._exit(0)
        finally:
            os._exit(1)
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""


def started(folder: Path | None, model: nn.Module | None = None, **options: Any) -> Ablations:
    """The run that is killed: many chunks, one thread."""
    torch.set_num_threads(1)
    options = {"batch_size": 1, "seed": 3, "score_positions": 0.5, **options}
    made = options.pop("schedules", default_schedules(BLOCKS))
    data = options.pop("data", ids(SEQUENCES, TOKENS))
    model = deep("llama", BLOCKS) if model is None else model
    return ablate(model, made, data, device="cpu", tokens=data.numel(), resume=folder, **options)


def chunks(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(folder.glob("*.npz"))}


def same(one: Ablations | pd.DataFrame, other: Ablations | pd.DataFrame) -> None:
    frames = [found if isinstance(found, pd.DataFrame) else found.table for found in (one, other)]
    pd.testing.assert_frame_equal(*frames, check_exact=True)


class Nursery:
    """Starts runs, and tells how each ended."""

    def __init__(self, script: subprocess.Popen[str]) -> None:
        assert script.stdin is not None
        assert script.stdout is not None
        self.orders, self.news = script.stdin, script.stdout

    def start(self) -> int:
        """The id of a process that keeps its chunks in `chunks` and its table in `table`."""
        print(file=self.orders, flush=True)
        return int(self.news.readline())

    def ended(self) -> int:
        return int(self.news.readline())


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "chunks"), str(tmp_path / "table")]
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as script:
        yield Nursery(script)
        script.stdin.close()


def test_killed_at_random_moments(tmp_path: Path, nursery: Nursery) -> None:
    """A real SIGKILL, several times on the way; each time what was finished is kept and is whole."""
    folder, result = tmp_path / "chunks", tmp_path / "table"
    rng = random.Random(0)
    finished: dict[str, tuple[int, bytes]] = {}
    for goal in (1, 5, 9, 14, 20):
        child = nursery.start()
        until = time.monotonic() + 120
        while len(list(folder.glob("*.npz"))) < goal and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(rng.random() * 0.1)
        os.kill(child, signal.SIGKILL)
        assert nursery.ended() == signal.SIGKILL
        left = chunks(folder)
        assert goal <= len(left) < SEQUENCES
        assert {name: left[name] for name in finished} == finished, "what was finished was run again"
        for name in left:
            with np.load(folder / name) as data:
                assert data["kl"].shape == (1, len(default_schedules(BLOCKS)))
        finished = left
        assert not result.exists()
    nursery.start()
    assert nursery.ended() == 0
    assert {name: chunks(folder)[name] for name in finished} == finished
    same(pd.read_pickle(result), started(None))


def test_a_second_run_only_reads(tmp_path: Path) -> None:
    data = ids(6, TOKENS)
    one = started(tmp_path, data=data)
    before = chunks(tmp_path)
    assert len(before) == 6
    same(started(tmp_path, data=data), one)
    assert chunks(tmp_path) == before
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", *[".npz"] * 6]


def test_chunks_that_another_run_left_behind_are_run_again(tmp_path: Path) -> None:
    """It was killed while it removed them, and what says whose they are was gone first."""
    data = ids(4, TOKENS)
    started(tmp_path, data=data, seed=4)
    (tmp_path / "run.json").unlink()
    left = chunks(tmp_path)
    same(started(tmp_path, data=data), started(None, data=data))
    assert not set(left.items()) & set(chunks(tmp_path).items())


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b[:-1], lambda b: b"", lambda b: b"PK" * 90])
def test_a_damaged_chunk_is_run_again(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    data = ids(4, TOKENS)
    one = started(tmp_path, data=data)
    before = chunks(tmp_path)
    name = "00000002.npz"
    (tmp_path / name).write_bytes(damage(before[name][1]))
    (tmp_path / "00000003.npz").unlink()
    same(started(tmp_path, data=data), one)
    after = chunks(tmp_path)
    assert set(after) == set(before)
    assert [other for other in before if after[other] != before[other]] == [name, "00000003.npz"]


def test_a_chunk_with_a_flipped_byte_is_run_again(tmp_path: Path) -> None:
    data = ids(2, TOKENS)
    one = started(tmp_path, data=data)
    path = tmp_path / "00000001.npz"
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
    same(started(tmp_path, data=data), one)


def test_chunks_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, replace = ids(3, TOKENS), os.replace

    def full(source: Any, target: Any) -> None:
        assert not Path(target).exists(), "it was written in place"
        if str(target).endswith("1.npz"):
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OutputError, match="No space left on device") as caught:
        started(tmp_path, data=data)
    assert "\n" not in str(caught.value)
    assert set(chunks(tmp_path)) == {"00000000.npz"}
    monkeypatch.undo()
    same(started(tmp_path, data=data), started(None, data=data))


def changed_weight(index: int) -> nn.Module:
    model = deep("llama", BLOCKS)
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.view(-1)[index] += 1e-3
    return model


def swapped(data: Tensor) -> Tensor:
    return data.flip(0)


class TestAnotherRun:
    DATA = ids(4, TOKENS)
    MADE = (skip(BLOCKS, [0]), skip(BLOCKS, [2]), merge(BLOCKS, [0, 1]), *controls(BLOCKS)[-1:])

    def _run(self, folder: Path | None, **change: Any) -> Ablations:
        return started(folder, **{"data": self.DATA, "schedules": self.MADE, **change})

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"model": deep("llama", BLOCKS, seed=1)}, "weights"),
            ({"model": changed_weight(0)}, "weights"),
            ({"model": changed_weight(777)}, "weights"),
            ({"model": deep("olmo2", BLOCKS)}, "model"),
            ({"data": ids(4, TOKENS, seed=1)}, "corpus"),
            ({"data": swapped(ids(4, TOKENS))}, "corpus"),
            ({"data": ids(4, TOKENS).reshape(8, TOKENS // 2), "seq_len": TOKENS // 2}, "corpus"),
            ({"data": ids(4, TOKENS)[:3]}, "corpus"),
            ({"schedules": [skip(BLOCKS, [0])]}, "schedules"),
            ({"schedules": [skip(BLOCKS, [2]), skip(BLOCKS, [0])]}, "schedules"),
            ({"schedules": [merge(BLOCKS, [0, 1], "mean")]}, "schedules"),
            ({"seed": 4}, "seed"),
            ({"score_positions": 1.0}, "score_positions"),
            ({"batch_size": 2}, "batch_size"),
        ],
    )
    def test_is_refused_and_what_differs_is_named(self, tmp_path: Path, change: dict[str, Any], named: str) -> None:
        self._run(tmp_path)
        before = chunks(tmp_path)
        with pytest.raises(OutputError, match=rf"another [\w, ]*{named}") as caught:
            self._run(tmp_path, **change)
        message = str(caught.value)
        assert "\n" not in message
        assert str(tmp_path) in message
        for other in {"weights", "corpus", "schedules", "seed", "score_positions", "batch_size"} - {named}:
            if named != "model":
                assert other not in message
        assert chunks(tmp_path) == before, "and nothing is overwritten"
        same(self._run(tmp_path), self._run(None))

    def test_another_combination_of_the_same_text_is_another_schedule(self, tmp_path: Path) -> None:
        started(tmp_path, data=self.DATA, schedules=["(0+1) 2-4"])
        with pytest.raises(OutputError, match="schedules"):
            started(tmp_path, data=self.DATA, schedules=["(0+1) 2-4"], combine="mean")

    def test_another_number_of_threads_rounds_otherwise(self, tmp_path: Path) -> None:
        anatomy, corpus = opened(deep("llama", 3), self.DATA), corpus_of(self.DATA)
        sweep(anatomy, corpus, [skip(3, [1])], resume=tmp_path)
        try:
            torch.set_num_threads(2)
            with pytest.raises(OutputError, match="another threads"):
                sweep(anatomy, corpus, [skip(3, [1])], resume=tmp_path)
        finally:
            torch.set_num_threads(1)

    def test_a_unigram_belongs_to_the_run(self, tmp_path: Path) -> None:
        anatomy, corpus = opened(deep("llama", 3), self.DATA), corpus_of(self.DATA)
        even = torch.full((96,), 1 / 96).log()
        settings = SweepSettings(batch_size=1)
        sweep(anatomy, corpus, [skip(3, [1])], settings, resume=tmp_path)
        with pytest.raises(OutputError, match="another unigram"):
            sweep(anatomy, corpus, [skip(3, [1])], settings, resume=tmp_path, unigram=even)

    @pytest.mark.parametrize("content", ["", "{", "[]", "3", "null", '{"seed": 3}', "\udcff"])
    def test_a_damaged_note_of_what_ran_is_not_trusted(self, tmp_path: Path, content: str) -> None:
        self._run(tmp_path)
        note = next(tmp_path.glob("*.json"))
        assert json.loads(note.read_text())["seed"] == 3
        note.write_bytes(content.encode(errors="surrogateescape"))
        with pytest.raises(OutputError, match="remove the folder") as caught:
            self._run(tmp_path)
        assert "\n" not in str(caught.value)


class TestFolders:
    def test_one_that_is_missing_is_made(self, tmp_path: Path) -> None:
        started(tmp_path / "a" / "b", data=ids(1, TOKENS))
        assert len(chunks(tmp_path / "a" / "b")) == 1

    def test_a_file_is_no_folder(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        for folder in (tmp_path / "file", tmp_path / "file" / "inside"):
            with pytest.raises(OutputError, match="cannot keep chunks") as caught:
                started(folder, data=ids(1, TOKENS))
            assert "\n" not in str(caught.value)

    def test_one_that_cannot_be_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(self: Path, content: bytes) -> int:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "write_bytes", refuse)  # a mode would not stop the superuser
        with pytest.raises(OutputError, match="Permission denied") as caught:
            started(tmp_path, data=ids(1, TOKENS))
        assert "\n" not in str(caught.value)
        assert not list(tmp_path.iterdir())

    def test_it_is_refused_before_anything_is_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setattr(engine, "_chunk", lambda *args: pytest.fail("a chunk was run"))
        with pytest.raises(OutputError):
            started(tmp_path / "file", data=ids(1, TOKENS))
