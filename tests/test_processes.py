"""Several processes are as one: the same numbers whatever the split, one voice, and a way on after one has died."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from lab_runs import run as train_run
from lab_runs import tiny
from transformers import GPT2Config, GPT2LMHeadModel

import depthprobe.analysis  # binds what is patched below, so it comes before
from depthprobe import cli, processes
from depthprobe.depth import suite
from depthprobe.errors import CheckpointError, DepthprobeError, UsageError, VerificationError
from depthprobe.measure import Settings, measure
from depthprobe.placement import device_named
from depthprobe.prepare import prepare
from depthprobe.processes import batches_in_all, dealt, exchange
from depthprobe.report import files

assert depthprobe.analysis
VOCAB = 64
SMALL = ["--device", "cpu", "--figures", "svg"]
COMMANDS = {
    "analyze": ["--tokens", "336", "--ablation-tokens", "200", "--gradient-tokens", "200", "--depth-tokens", "200"],
    "ablate": ["--tokens", "336", "--score-positions", "0.5"],
    "depth": ["--tokens", "336", "--twins", "1"],
}
# Of one process and of several: times, how often a block was run on a batch, what was typed and where
DIFFER = ("seconds", "evaluations", "command", "created", "machine")
DATA = {"seven": 7, "two": 2}  # sequences: an uneven split, and an empty share among three
CASES = [
    ("analyze", "gpt2", "seven"), ("analyze", "gpt2", "two"), ("analyze", "post", "seven"), ("ablate", "gpt2", "seven"),
    ("ablate", "gpt2", "two"), ("depth", "gpt2", "seven"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of the time, and is tested elsewhere."""
    monkeypatch.setattr(files.figures, "render", lambda *_: b"")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2, a post-LN model of the lab, and ids for both; one embedding of another is not finite."""
    root = tmp_path_factory.mktemp("processes")
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 48, "tie_word_embeddings": False}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, bos_token_id=0, eos_token_id=0, **sizes))
    with torch.no_grad():
        model.transformer.wte.weight *= 20
    model.save_pretrained(root / "gpt2")
    with torch.no_grad():
        model.transformer.wte.weight[VOCAB - 1] = 3e38
    model.save_pretrained(root / "broken")
    train_run(root / "post", tiny(hidden_size=16, num_hidden_layers=3, placement="post"))
    rng = np.random.default_rng(0)
    for name, count in DATA.items():
        np.save(root / f"{name}.npy", rng.integers(0, VOCAB - 1, (count, 48)))
        np.save(root / f"{name}-post.npy", rng.integers(0, VOCAB - 1, (count, 16)))
    last = rng.integers(0, VOCAB - 1, (6, 48))
    last[5, 20] = VOCAB - 1
    np.save(root / "last.npy", last)
    return root


def forked(jobs: list[tuple[int, list[str]]], **environment: str) -> tuple[list[list[int]], str]:
    """The exit statuses of each job's processes, and what they said."""
    environment["OMP_NUM_THREADS"] = "1"
    made = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("forked.py"))], text=True, capture_output=True, check=True,
        input=json.dumps([[count, arguments, environment] for count, arguments in jobs]),
    )  # fmt: skip
    return json.loads(made.stdout.splitlines()[-1]), made.stderr


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a report, by its path."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flat(part, f"{path}/{key}")
    else:
        yield path, value


def same(one: Path, other: Path, relative: float) -> int:
    """How many numbers of two reports were compared; fails unless all agree."""
    first, second = (dict(flat(json.loads((path / "report.json").read_text()))) for path in (one, other))
    assert first.keys() == second.keys()
    compared = 0
    for path, value in first.items():
        if any(word in path for word in DIFFER):
            continue
        if isinstance(value, float) and isinstance(second[path], float):
            assert second[path] == pytest.approx(value, rel=relative, abs=1e-12), path
            compared += 1
        else:
            assert second[path] == value, path
    return compared


@pytest.fixture(scope="module")
def reports(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """out/command-model-data-count: reports of 1, 2 and 3 processes."""
    out, jobs = tmp_path_factory.mktemp("reports"), []
    for command, model, data in CASES:
        for count in (1, 2, 3):
            ids = root / (f"{data}.npy" if model == "gpt2" else f"{data}-post.npy")
            given = [command, root / model, "--data", ids, *COMMANDS[command], *SMALL]
            jobs.append((count, [*map(str, given), "--out", str(out / f"{command}-{model}-{data}-{count}")]))
    statuses, said = forked(jobs)
    assert statuses == [[0] * count for count, _ in jobs], said
    return out


@pytest.mark.parametrize(("command", "model", "data"), CASES)
def test_the_numbers_are_those_of_one_process(reports: Path, command: str, model: str, data: str) -> None:
    one = reports / f"{command}-{model}-{data}-1"
    for count in (2, 3):
        assert same(one, reports / f"{command}-{model}-{data}-{count}", 1e-6) > 200


def test_evaluations_are_those_of_all_processes(reports: Path) -> None:
    """A sweep runs the trie once a batch, and each process has one: an empty share has none."""

    def evaluations(name: str) -> int:
        return int(json.loads((reports / name / "report.json").read_text())["merging"]["evaluations"])

    once = evaluations("ablate-gpt2-seven-1")
    assert [evaluations(f"ablate-gpt2-seven-{count}") for count in (2, 3)] == [2 * once, 3 * once]
    assert [evaluations(f"ablate-gpt2-two-{count}") for count in (2, 3)] == [2 * once, 2 * once]


def test_the_report_says_how_many_there_were(reports: Path) -> None:
    document = json.loads((reports / "analyze-gpt2-seven-3" / "report.json").read_text())
    assert document["run"]["command"].startswith("torchrun --nproc-per-node 3 -m depthprobe analyze ")
    assert document["run"]["machine"]["processes"] == 3


def test_an_error_in_one_process_ends_all_and_is_said_once(root: Path, tmp_path: Path) -> None:
    """The id that is not finite is in the last sequence, which the last process has."""
    given = ["analyze", root / "broken", "--data", root / "last.npy", *SMALL, "--out", tmp_path / "out"]
    statuses, said = forked([(3, list(map(str, given)))])
    assert statuses == [[1, 1, 1]]
    assert said.count("depthprobe: ") == 1
    assert "not finite" in said
    assert "sequence 5, position" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["stages", "gpt2"], 2, "2 processes for depthprobe stages"),
        (["analyze", "nowhere"], 1, "nowhere"),
        (["analyze", "gpt2", "--data", "nowhere.npy"], 1, "nowhere.npy"),
        (["analyze", "gpt2", "--max-memory", "cpu=3GiB"], 2, "--max-memory or --offload-folder with 2 processes"),
    ],
)
def test_what_is_refused_is_said_once(
    root: Path, tmp_path: Path, arguments: list[str], status: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    statuses, said = forked([(2, [*arguments, "--device", "cpu"] if arguments[0] == "analyze" else arguments)])
    assert statuses == [[status, status]]
    assert said.count("depthprobe: ") == 1, said
    assert words in said


def test_what_one_process_alone_cannot_do_is_left_out_in_all(root: Path, tmp_path: Path) -> None:
    """No memory for a random twin: a note in the report, and no process waits for another."""
    given = ["depth", root / "gpt2", "--data", root / "two.npy", "--estimators", "crossing", "--no-phases", *SMALL]
    statuses, said = forked([(2, list(map(str, [*given, "--out", tmp_path / "out"])))], NO_TWIN_IN="1")
    assert statuses == [[0, 0]], said
    notes = json.loads((tmp_path / "out" / "report.json").read_text())["deep"]["notes"]
    assert "The control random-init could not be made: there is no memory for a twin." in notes


def test_processes_with_different_weights_are_refused(root: Path, tmp_path: Path) -> None:
    for name, folder in (("0", "gpt2"), ("1", "broken")):
        (tmp_path / name).symlink_to(root / folder)
    given = ["analyze", str(tmp_path / "{rank}"), "--data", str(root / "two.npy"), *SMALL, "--out", str(tmp_path / "o")]
    statuses, said = forked([(2, given)])
    assert statuses == [[1, 1]]
    assert said.count("depthprobe: the processes hold different weights") == 1


@pytest.mark.parametrize("value", ["", "x", "2"])
def test_commands_that_divide_nothing_take_no_notice(
    value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Clusters export WORLD_SIZE for everything that runs on them."""
    monkeypatch.setenv("WORLD_SIZE", value)
    assert status("metrics", "update_ratio") == 0
    assert status("--version") == 0
    assert "update_ratio" in capsys.readouterr().out


def test_checkpoints_are_not_compared_by_several(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each would measure all of it, and write over the others' files."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.chdir(tmp_path)
    assert status("compare", root / "gpt2", root / "post") == 2
    assert "several processes compare" in capsys.readouterr().err
    assert not (tmp_path / "reports" / "gpt2").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="torchrun needs libuv there")
def test_a_checkpoint_that_fails_leaves_the_comparison_to_the_others(root: Path, tmp_path: Path) -> None:
    """By torchrun, which ends all processes as soon as one has ended with an error."""
    shutil.copytree(root / "gpt2", tmp_path / "other")
    given = ["analyze", root / "gpt2", tmp_path / "other", root / "nowhere", "--data", root / "two.npy", *SMALL]
    quick = ["--no-ablations", "--gradient-tokens", "0", "--depth-tokens", "0", "--out", tmp_path / "out"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    made = subprocess.run(
        [*map(str, [*torchrun, "-m", "depthprobe", *given, *quick])],
        text=True, capture_output=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert made.returncode != 0
    assert (tmp_path / "out" / "compare" / "compare.json").exists(), made.stderr
    assert "1 of 3 failed, as nowhere" in made.stderr
    assert "told to end" not in made.stderr


def test_processes_share_gpus_where_there_are_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert str(device_named("auto")) == "cuda"
    monkeypatch.setenv("WORLD_SIZE", "3")
    for local, device in (("0", "cuda:0"), ("1", "cuda:1"), ("2", "cuda:0")):
        monkeypatch.setenv("LOCAL_RANK", local)
        assert str(device_named("auto")) == device
    assert list(map(str, current)) == ["cuda:0", "cuda:1", "cuda:0"], "for kernels that ask for the current one"
    assert str(device_named("cuda:1")) == "cuda:1"


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this were the first of two processes, of which the other one does and finds the same."""
    monkeypatch.setattr(processes, "_rank", 0)
    monkeypatch.setattr(processes, "_count", 2)
    monkeypatch.setattr(processes, "_gather", lambda value: [pickle.loads(pickle.dumps(value))] * 2)
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda *_, **__: None)


class _Unsent(Exception):
    """An error that cannot be sent, as those of other libraries may not be."""

    def __init__(self, found: str, lock: Any) -> None:
        super().__init__(found)
        self.lock = lock


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("way", [processes.together, processes.told, "dealt"])
def test_any_error_is_raised_in_all(way: Any) -> None:
    """Memory that runs out in one process ends its checkpoint, and not the comparison."""

    def work() -> None:
        raise _Unsent("out of memory", threading.Lock())

    def share(work: Callable[[], None]) -> None:
        with dealt(4):
            work()

    with pytest.raises(_Unsent) as caught:
        (share if way == "dealt" else way)(work)
    assert caught.value.everywhere  # type: ignore[attr-defined]


def test_the_error_of_another_process_is_named(monkeypatch: pytest.MonkeyPatch, two: None) -> None:
    monkeypatch.setattr(processes, "_gather", lambda value: [value, processes._sent(ValueError("no\nsense"))])
    with pytest.raises(DepthprobeError, match=r"another process of this run failed with ValueError: no$") as caught:
        processes.together(lambda: None)
    assert caught.value.everywhere


@pytest.mark.usefixtures("two")
def test_a_text_that_is_too_short_is_so_for_all(root: Path) -> None:
    _, corpus, anatomy = prepare(root / "gpt2", np.load(root / "two.npy"), device="cpu")
    with pytest.raises(UsageError, match="leaves nothing") as caught:
        measure(anatomy, corpus, Settings(skip_first=48))
    assert caught.value.everywhere


@pytest.mark.parametrize("odd", ["kind of device", "dtype", "transformers"])
def test_unlike_processes_are_refused(odd: str, root: Path, monkeypatch: pytest.MonkeyPatch, two: None) -> None:
    """A machine whose driver is broken falls back to its CPU."""

    def gather(value: Any) -> list[Any]:
        return [value, {**value, odd: "another"} if isinstance(value, dict) and odd in value else value]

    monkeypatch.setattr(processes, "_gather", gather)
    with pytest.raises(CheckpointError, match=rf"the processes have .*another.* as their {odd}"):
        prepare(root / "gpt2", np.load(root / "two.npy"), device="cpu")


def test_processes_that_found_different_branches_are_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch, two: None
) -> None:
    def gather(value: Any) -> list[Any]:
        blocks = isinstance(value, tuple) and len(value) > 0 and hasattr(value[0], "branches")
        return [value, value[:-1] if blocks else value]

    monkeypatch.setattr(processes, "_gather", gather)
    with pytest.raises(VerificationError, match="different branches"):
        prepare(root / "gpt2", np.load(root / "two.npy"), device="cpu")


def test_reading_reports_needs_no_torch() -> None:
    """Comparing finished reports takes a second or two, and torch would double that."""
    code = "import sys, depthprobe.comparison, depthprobe.progress, depthprobe.report; print('torch' in sys.modules)"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "False"


def test_no_other_process_is_told_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """WORLD_SIZE without torchrun's other variables."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as stop:
        cli.main(["analyze", "anything"])
    assert stop.value.code == 2
    assert "torchrun --nproc-per-node N" in capsys.readouterr().err


def test_a_dead_process_ends_the_run_and_resume_goes_on(root: Path, tmp_path: Path) -> None:
    """Real torchrun, a real kill: the other process says what happened, and finished chunks are not run again."""
    np.save(tmp_path / "many.npy", np.random.default_rng(1).integers(0, VOCAB, (600, 48)))
    given = ["ablate", root / "gpt2", "--data", tmp_path / "many.npy", "--tokens", 600 * 48, "--batch-size", 2, *SMALL]
    out = tmp_path / "out"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "depthprobe"]
    command += [*map(str, given), "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as started:
        wait_for(lambda: len(list((out / ".chunks").glob("*.npz"))) >= 4)
        workers = {p.environ().get("RANK"): p for p in psutil.Process(started.pid).children() if "RANK" in p.environ()}
        workers["1"].send_signal(signal.SIGKILL)
        said = started.communicate(timeout=120)[1]
    assert started.returncode != 0
    assert "depthprobe: process 0 of 0 to 1: " in said
    assert "--resume goes on" in said
    assert not (out / "report.json").exists()
    kept = {path: path.stat().st_mtime_ns for path in (out / ".chunks").glob("*.npz")}
    assert len(kept) >= 4
    whole = [*map(str, given), "--out", str(tmp_path / "whole")]
    again = subprocess.run([*command, "--resume"], capture_output=True, text=True, env=environment, check=False)
    assert again.returncode == 0, again.stderr
    assert not (out / ".chunks").exists()
    statuses, _ = forked([(1, whole)])
    assert statuses == [[0]]
    assert same(tmp_path / "whole", out, 1e-6) > 100


def wait_for(what: Any, seconds: float = 120) -> None:
    ends = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < ends, "it did not happen"
        time.sleep(0.02)


# --- one process that is stopped, and goes on ------------------------------------------------------------------------


def status(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main([str(argument) for argument in arguments])
    return int(stop.value.code or 0)


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def forbidden(*_: object, **__: object) -> None:
    raise AssertionError("this was finished before")


def test_analyze_goes_on_after_what_it_finished(
    root: Path, tmp_path: Path, reports: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [
        "analyze",
        root / "gpt2",
        "--data",
        root / "seven.npy",
        *COMMANDS["analyze"],
        *SMALL,
        "--out",
        tmp_path / "o",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("depthprobe.effective.with_phases", interrupt)
        assert status(*given) == 130
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last == ("depthprobe: interrupted; the unmodified run, gradients, effective depth is kept, --resume goes on")
    assert not (tmp_path / "o").exists()
    with pytest.MonkeyPatch.context() as patch:
        for done in (
            "depthprobe.measure.measure",
            "depthprobe.gradient.with_gradients",
            "depthprobe.effective.with_effective",
        ):
            patch.setattr(done, forbidden)
        assert status(*given, "--resume") == 0
    assert same(reports / "analyze-gpt2-seven-1", tmp_path / "o", 1e-9) > 200
    assert [path.name for path in tmp_path.iterdir()] == ["o"]


def test_analyze_refuses_to_go_on_with_something_else(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["analyze", root / "gpt2", *SMALL, "--tokens", 96, "--out", tmp_path / "o", "--data"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("depthprobe.gradient.with_gradients", interrupt)
        assert status(*given, root / "seven.npy") == 130
    assert status(*given, root / "two.npy", "--resume") == 1
    assert "sha256 of the text" in capsys.readouterr().err
    few = ("--gradient-tokens", 0, "--depth-tokens", 0, "--no-ablations")
    assert status(*given, root / "two.npy", *few) == 0  # and without --resume it starts anew
    assert [path.name for path in tmp_path.iterdir()] == ["o"]


def test_analyze_goes_on_with_the_same_versions_alone(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was kept is in the report's folder, where there is one, and none of it is taken if torch has changed."""
    (tmp_path / "o").mkdir()
    given = ["analyze", root / "gpt2", *SMALL, "--tokens", 96, "--out", tmp_path / "o", "--data", root / "two.npy"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("depthprobe.gradient.with_gradients", interrupt)
        assert status(*given) == 130
    kept = tmp_path / "o" / ".unfinished" / "report.json"
    document = json.loads(kept.read_text())
    document["run"]["unfinished"]["of"]["torch"] = "1.0"
    kept.write_text(json.dumps(document))
    assert status(*given, "--resume") == 1
    assert "another torch; leave out --resume to start anew" in capsys.readouterr().err
    kept.write_text("{")
    assert status(*given, "--resume") == 1
    assert "leave out --resume to start anew" in capsys.readouterr().err


def test_depth_goes_on_after_what_it_finished(root: Path, tmp_path: Path, reports: Path) -> None:
    given = ["depth", root / "gpt2", "--data", root / "seven.npy", *COMMANDS["depth"], *SMALL, "--out", tmp_path / "o"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("depthprobe.controls.random_tokens", interrupt)
        assert status(*given) == 130
    kept = list((tmp_path / "o" / ".estimates").glob("*.json"))
    assert len(kept) == 1 + 2 * len(suite.ESTIMATORS) - 1  # what they belong to, the model and its twin, less `effects`
    (tmp_path / "o" / ".estimates" / "model-lens.json").write_text("")  # damaged: made again
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suite, "run_skips", forbidden)
        patch.setattr("depthprobe.controls.random_tokens", interrupt)
        assert status(*given, "--resume") == 130
    assert status(*given, "--resume") == 0
    assert same(reports / "depth-gpt2-seven-1", tmp_path / "o", 1e-9) > 200
    assert not (tmp_path / "o" / ".estimates").exists()


def test_depth_refuses_estimates_of_something_else(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["depth", root / "gpt2", *SMALL, "--twins", 1, "--estimators", "crossing,lens", "--out", tmp_path / "o"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("depthprobe.controls.random_tokens", interrupt)
        assert status(*given, "--data", root / "seven.npy") == 130
    assert status(*given, "--data", root / "two.npy", "--resume") == 1
    assert "holds a run with another corpus" in capsys.readouterr().err


# --- alone -----------------------------------------------------------------------------------------------------------


def test_one_process_has_all_and_waits_for_none() -> None:
    rows = np.zeros((5, 2))
    with dealt(5, rows) as mine:
        assert mine == range(5)
    columns = {"a": rows}
    exchange(columns, 5)
    assert columns["a"] is rows
    assert batches_in_all(5, 2) == 3
