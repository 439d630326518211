"""Tasks of known depth: right answers, a test that training never sees, and the search for the fewest blocks."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from test_analyses import ROOT, script
from transformers import AutoModelForCausalLM

import depthprobe
from depthprobe.errors import OutputError, UsageError
from depthprobe.lab import LabConfig, TrainSettings
from depthprobe.lab.search import BEYOND, Line, Run, answers, judge, wanted
from depthprobe.lab.task_training import LEARNED, accuracy, train_task
from depthprobe.lab.tasks import IGNORED, TASKS, Moves, PointerChase, Products, Task, is_test, make_task, products

KINDS: list[Task] = [PointerChase(3), Moves(3), Products(3)]
SETTINGS = TrainSettings(steps=300, batch_size=32, lr=5e-3, warmup=20, weight_decay=0.0, eval_every=25, device="cpu")


def instances(task: Task, ids: torch.Tensor) -> list[tuple[int, ...]]:
    """What the sequences are about."""
    width = task.k * task.symbols if isinstance(task, PointerChase) else task.k + isinstance(task, Moves)
    return [tuple(row) for row in ids[:, 1 : 1 + width].tolist()]


# Answers


@pytest.mark.parametrize(("k", "symbols", "starts"), [(1, 6, 4), (2, 5, 5), (4, 6, 4)])
def test_pointers_lead_where_the_lists_say(k: int, symbols: int, starts: int) -> None:
    task = PointerChase(k, symbols, starts)
    ids, labels = task.batch(0, 0, 40)
    assert ids.shape == labels.shape == (40, task.seq_len)
    for row, wanted_ in zip(ids.tolist(), labels.tolist(), strict=True):
        assert row[0] == row[-1] == task.vocab_size - 1
        lists = [row[1 + step * symbols : 1 + (step + 1) * symbols] for step in range(k)]
        place = 1 + k * symbols
        for steps in range(k, 0, -1):
            asked = row[place : place + starts]
            assert len(set(asked)) == starts
            for symbol in asked:
                for step in range(steps):
                    symbol = lists[step][symbol]
                assert wanted_[place + 1] == symbol  # the label at t is predicted at t − 1
                assert task.depths[place + 1] == steps
                place += 1
        assert place == task.seq_len - 1
        assert wanted_[: 1 + k * symbols] == row[: 1 + k * symbols]


def test_points_are_moved_as_the_letters_say() -> None:
    task = Moves(4, points=7, letters=5)
    ids, labels = task.batch(0, 0, 40)
    assert sorted(map(tuple, np.sort(task.permutations, axis=1).tolist())) == [tuple(range(7))] * 5
    for row, wanted_ in zip(ids.tolist(), labels.tolist(), strict=True):
        point = row[1]
        for place in range(2, 6):
            point = task.permutations[row[place] - 7][point]
            assert wanted_[place + 1] == point
    assert task.depths.tolist() == [0, 0, 0, 1, 2, 3, 4]
    assert bool((labels[:, :3] == IGNORED).all())
    assert np.array_equal(Moves(2, 7, 5).permutations, task.permutations)  # the same letters for every k


def test_the_table_of_products_is_composition() -> None:
    elements = list(itertools.permutations(range(4)))
    table = products(4)
    for first, second in itertools.product(range(24), repeat=2):
        composed = tuple(elements[second][elements[first][point]] for point in range(4))
        assert elements[table[first, second]] == composed
    assert sorted(table[3]) == sorted(table[:, 3]) == list(range(24))


def test_products_of_words() -> None:
    task = Products(5)
    elements = list(itertools.permutations(range(4)))
    ids, labels = task.batch(0, 0, 40)
    for row, wanted_ in zip(ids.tolist(), labels.tolist(), strict=True):
        product = tuple(range(4))
        for place in range(1, 6):
            product = tuple(elements[row[place]][point] for point in product)
            assert elements[wanted_[place + 1]] == product
    assert task.depths.tolist() == [0, 0, 1, 2, 3, 4, 5]


# Seeds, and the test


@pytest.mark.parametrize("task", KINDS, ids=lambda task: task.name)
def test_batches_depend_on_seed_and_step_alone(task: Task) -> None:
    ids, labels = task.batch(3, 5, 99)
    again = make_task(task.name.split("-")[0], task.k).batch(3, 5, 99)
    assert torch.equal(ids, again[0])
    assert torch.equal(labels, again[1])
    assert not torch.equal(ids, task.batch(3, 6, 99)[0])
    assert not torch.equal(ids, task.batch(4, 5, 99)[0])
    assert int(ids.max()) == task.vocab_size - 1
    assert int(ids.min()) == 0
    asked = labels != IGNORED
    assert bool((asked == asked[0]).all())  # as many in every row, as a source of batches must have
    assert bool(asked[0][task.depths > 0].all())
    assert set(task.depths.tolist()) == set(range(task.k + 1))
    assert task.sha256 == make_task(task.name.split("-")[0], task.k).sha256


@pytest.mark.parametrize(
    "task", [PointerChase(1, symbols=4), Moves(2), Products(3, points=3)], ids=lambda task: task.name
)
def test_training_and_test_share_no_instance(task: Task) -> None:
    # With so few instances, a split by lot would have thousands in common
    test = set(instances(task, task.validation[0]))
    training = {found for step in range(20) for found in instances(task, task.batch(0, step, 500)[0])}
    assert len(test) > 20
    assert len(training) > 150
    assert not test & training


def test_one_instance_of_eight_is_for_the_test() -> None:
    every = np.array(list(itertools.product(range(24), repeat=3)))
    share = is_test(every)
    assert abs(share.mean() - 1 / 8) < 0.01
    for column in range(3):  # and whatever stands at a place is in both
        assert set(every[share][:, column]) == set(every[~share][:, column]) == set(range(24))


def test_what_no_task_can_have() -> None:
    with pytest.raises(UsageError, match="chase, moves, products"):
        make_task("sort", 3)
    for name, least in (("chase", 1), ("moves", 2), ("products", 3)):
        assert make_task(name, least).seq_len > least
        with pytest.raises(UsageError, match=f"at least {least}"):
            make_task(name, least - 1)
    with pytest.raises(UsageError, match="7 different starts among 6"):
        PointerChase(1, starts=7)
    with pytest.raises(UsageError, match="from 2 to 5"):
        Products(3, points=6)
    with pytest.raises(UsageError, match="chase-1 has too few instances"):
        _ = PointerChase(1, symbols=1, starts=1).validation
    config = LabConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, causal=False)
    with pytest.raises(UsageError, match="bidirectional"):
        train_task(PointerChase(1), config, SETTINGS)


# Training


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_one_block_follows_one_pointer(placement: str) -> None:
    task = PointerChase(1)
    config = LabConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, mlp_ratio=1.0, placement=placement, qk_norm=True
    )
    seen: list[tuple[int, float]] = []
    result, model = train_task(task, config, SETTINGS, lambda step, right: seen.append((step, right)))
    assert result.status == "learned"
    assert result.accuracy == seen[-1][1] >= LEARNED
    assert all(right < LEARNED for _, right in seen[:-1])
    assert result.steps == seen[-1][0] < SETTINGS.steps
    ids, labels = task.validation
    with torch.no_grad():
        answered = model(input_ids=ids).logits.argmax(-1)[:, :-1] == labels[:, 1:]
    assert float(answered[:, task.depths[1:] == 1].double().mean()) == pytest.approx(result.accuracy)
    again, _ = train_task(task, config, SETTINGS)
    assert (again.steps, again.accuracy, again.loss) == (result.steps, result.accuracy, result.loss)


def test_one_block_does_not_follow_two_pointers() -> None:
    task = PointerChase(2)
    config = LabConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, mlp_ratio=1.0, qk_norm=True)
    result, model = train_task(task, config, SETTINGS)
    assert result.status == "not learned"
    assert result.steps == SETTINGS.steps
    right, every = accuracy(model, task)
    assert right == result.accuracy < 0.6
    assert every == result.accuracy_all > right + 0.2  # one pointer it does


def test_a_run_that_diverges_ends() -> None:
    config = LabConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, placement="none")
    settings = replace(SETTINGS, lr=1e30, warmup=0)
    result, _ = train_task(PointerChase(1), config, settings)
    assert result.status == "diverged"
    assert result.loss is None
    assert result.steps < 100


# The search


def made(k: int, blocks: int, seed: int, learned: bool) -> Run:
    status = "learned" if learned else "not learned"
    return Run("chase", k, "pre", blocks, seed, int(learned), status, 0.5, 0.5, 1.0, 10, 10 * k, 100, 1.0)


def simulate(need: dict[int, int], lucky: int = 0) -> tuple[list[Run], dict[int, int | None]]:
    """Run the search where k needs so many blocks, and only the seed `lucky` learns it then."""
    line, runs = Line("chase", "pre", tuple(need)), list[Run]()
    while jobs := wanted(runs, [line], seeds=2, steps=10):
        job = jobs[0]
        assert job.budget == 10 * job.k
        runs.append(made(job.k, job.blocks, job.seed, job.blocks >= need[job.k] and job.seed == lucky))
        assert len(runs) < 100
    return runs, answers(runs, line, 2)


@pytest.mark.parametrize("need", [{1: 1}, {1: 1, 2: 2, 3: 2, 4: 3}, {2: 3, 4: 4}, {2: 2, 4: 1}, {1: 2, 2: 2}])
@pytest.mark.parametrize("lucky", [0, 1])
def test_the_search_finds_the_smallest_number_of_blocks(need: dict[int, int], lucky: int) -> None:
    runs, found = simulate(need, lucky)
    assert found == need
    for k, blocks in need.items():
        assert judge(runs, "chase", k, "pre", blocks, 2) is True
        if blocks > 1:  # all seeds failed below, with as many updates
            assert judge(runs, "chase", k, "pre", blocks - 1, 2) is False
            assert sum((run.k, run.blocks) == (k, blocks - 1) for run in runs) == 2


def test_a_task_that_is_not_learned_is_no_truth() -> None:
    runs, found = simulate({1: 1, 2: 9, 3: 2})
    assert found == {1: 1, 2: None, 3: 2}
    assert max(run.blocks for run in runs if run.k == 2) == 1 + BEYOND


def test_idle_workers_get_further_seeds() -> None:
    lines = [Line("chase", "pre", (1, 2)), Line("chase", "post", (1,))]
    jobs = wanted([made(1, 1, 0, learned=True)], lines, seeds=2, steps=10)
    assert [(job.placement, job.k, job.blocks, job.seed) for job in jobs] == [
        ("pre", 2, 1, 0), ("post", 1, 1, 0), ("pre", 2, 1, 1), ("post", 1, 1, 1),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search of one k, which takes one run."""
    folder = tmp_path_factory.mktemp("known")
    assert script("known_depth").main(arguments(folder)) == 0
    return folder


def arguments(folder: Path) -> list[str]:
    places = [f"--{name}={folder / name}" for name in ("out", "results", "work")]
    return ["--tasks=chase", "--ks=1", "--placements=pre", "--workers=1", "--deep=2", *places]


def test_the_script_keeps_the_model_and_its_test(kept: Path) -> None:
    rows = pd.read_csv(kept / "results")
    assert rows[["task", "k", "placement", "blocks", "learned"]].to_numpy().tolist() == [
        ["chase", 1, "pre", blocks, 1] for blocks in (1, 2)
    ]
    folder, task = kept / "out" / "chase-1", PointerChase(1)
    ids, labels = (np.load(folder / f"{name}.npy") for name in ("ids", "labels"))
    assert np.array_equal(ids, task.validation[0])
    assert np.array_equal(labels, task.validation[1])
    assert np.array_equal(np.load(folder / "depths.npy"), task.depths)
    model = AutoModelForCausalLM.from_pretrained(folder / "pre")
    assert model.dtype == torch.float32
    assert accuracy(model, task)[0] == pytest.approx(rows.accuracy[0], abs=0.005)
    assert (folder / "pre" / "model.safetensors").stat().st_size < 2.2 * rows.parameters[0] + 10_000
    text = (kept / "out" / "README.md").read_text()
    assert task.sha256 in text
    assert "| chase | 1 | pre | 1 | " in text
    assert AutoModelForCausalLM.from_pretrained(folder / "pre-deep").config.num_hidden_layers == 2


def test_a_kept_model_can_be_analysed(kept: Path) -> None:
    folder = kept / "out" / "chase-1"
    report = depthprobe.analyze(str(folder / "pre"), data=str(folder / "ids.npy"), tokens=320)
    assert {0, 1} <= set(report.to_frame().layer)


def test_the_script_goes_on_where_it_was(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (kept / "results").read_bytes()
    assert script("known_depth").main(arguments(kept)) == 0
    assert (kept / "results").read_bytes() == before
    assert "| chase | 1 | pre | 1 |" in capsys.readouterr().out
    assert script("known_depth").main([*arguments(kept), "--steps=7"]) == OutputError.exit_code
    assert "as many as now" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "said"),
    [("--ks=a", "whole numbers"), ("--ks=0", "at least 1"), ("--tasks=x", "moves"), ("--placements=x", "pre or post"),
     ("--seeds=0", "at least 1"), ("--steps=0", "at least 1")],
)  # fmt: skip
def test_impossible_options_of_the_script(
    kept: Path, option: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script("known_depth").main([*arguments(kept), option]) == UsageError.exit_code
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_workers_end_with_a_search_that_is_killed(tmp_path: Path) -> None:
    places = [f"--{name}={tmp_path / name}" for name in ("out", "results", "work")]
    command = [sys.executable, str(ROOT / "analyses" / "known_depth.py"), "--tasks=moves", "--ks=3", *places]
    search = psutil.Popen(command, stderr=subprocess.DEVNULL)
    try:
        workers = wait_for(lambda: [one for one in search.children() if one.num_threads() > 1])
    finally:
        search.kill()
        search.wait()
    wait_for(lambda: not psutil.wait_procs(workers, timeout=0.1)[1])


def wait_for(what: Callable[[], Any]) -> Any:
    """What it returns once that is true."""
    end = time.monotonic() + 60
    while not (found := what()):
        assert time.monotonic() < end
        time.sleep(0.1)
    return found


def test_every_task_has_a_name() -> None:
    assert [make_task(name, 3).name for name in TASKS] == ["chase-3", "moves-3", "products-3"]
