"""benchmark.py: both sides do the same work, ratios are those of the times, and what was measured outlives a stop."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from depthprobe.errors import OutputError

ROOT = Path(__file__).parent.parent
with pytest.MonkeyPatch.context() as _patch:
    # scripts import each other as they do where they are run: from their own folder
    _patch.syspath_prepend(str(ROOT / "analyses"))
    plain, tools, report, benchmark = (
        importlib.import_module(name)
        for name in ("benchmark_plain", "benchmark_tools", "benchmark_report", "benchmark")
    )
CHECKPOINTS = {name: str(ROOT / "data" / name) for name in ("gpt2-manual", "checkpoints/post")}


class ByHand(tools.Hooked):
    """torch's own hooks and nothing else."""

    @contextmanager
    def hooked(self, hooks: dict[int, Any], before: dict[int, Any]) -> Iterator[None]:
        handles = [self.blocks[i].register_forward_hook(hook) for i, hook in hooks.items()]
        handles += [self.blocks[i].register_forward_pre_hook(hook) for i, hook in before.items()]
        yield
        for handle in handles:
            handle.remove()

    def states(self, ids: Tensor) -> list[Tensor]:
        seen: list[Tensor] = []
        hooks = {i: lambda module, args, z: seen.append(z) for i in range(len(self.blocks))}
        with self.hooked(hooks, {0: lambda module, args: seen.append(args[0])}):
            self.logits(ids)
        return seen

    def changed(self, ids: Tensor, change: Any, positions: Tensor | None = None) -> Tensor:
        kind, index = change or ("", 0)
        kept: dict[str, Tensor] = {}

        def keep(module: Any, args: Any) -> None:
            kept["x"] = args[0]

        def read_x(module: Any, args: Any, z: Tensor) -> Tensor:
            kept["z"] = z
            return kept["x"]

        hooks: dict[int, Any] = {}
        if kind in ("skip", "merge"):
            hooks[index] = read_x
        if kind == "merge":
            hooks[index + 1] = lambda module, args, z: kept["z"] + z - kept["x"]
        blocks = list(self.blocks)
        if kind == "swap":
            self.blocks[index], self.blocks[index + 1] = blocks[index + 1], blocks[index]
        with self.hooked(hooks, {index: keep} if hooks else {}):
            logits = self.logits(ids)
        for place, block in enumerate(blocks):
            self.blocks[place] = block
        return logits if positions is None else plain.at(logits, positions)


@pytest.fixture(scope="module", params=CHECKPOINTS)
def measured(request: pytest.FixtureRequest) -> tuple[str, Any, dict[str, Any]]:
    """A checkpoint, the task, and depthprobe's numbers."""
    checkpoint = CHECKPOINTS[request.param]
    tool = tools.Depthprobe(checkpoint)
    task, about = tool.task(256, 48)
    assert about["schedules"] == len(task.changes) == 3 * about["blocks"] - 2
    ours: dict[str, Any] = {}
    with torch.no_grad():
        for what in ("probes", "quarter", "every"):
            times, _, numbers = tools.run(tool, what, task)
            assert list(times) == [what]
            assert all(seconds > 0 for seconds in times[what])
            ours |= numbers
    return checkpoint, task, ours


def numbers_of(tool: Any, what: str, task: Any) -> dict[str, Any]:
    with torch.no_grad():
        return tools.run(tool, what, task)[2]


def test_statistics_by_hand_are_those_of_the_probes(measured: Any) -> None:
    checkpoint, task, ours = measured
    theirs = numbers_of(ByHand(checkpoint), "statistics", task)
    assert set(theirs) == {*plain.LAYERS, *plain.PAIRS}
    assert {name: values.shape for name, values in theirs.items()} == {name: ours[name].shape for name in theirs}
    assert theirs["cosine"].std() > 0.01
    assert max(plain.distance(theirs, {name: ours[name] for name in theirs}).values()) < 1e-5


def test_effects_by_hand_are_those_of_the_sweep(measured: Any) -> None:
    checkpoint, task, ours = measured
    tool = ByHand(checkpoint)
    swept, thrifty = numbers_of(tool, "sweep", task), numbers_of(tool, "thrifty", task)
    assert set(swept) == {f"{share} {effect}" for share in ("quarter", "every") for effect in plain.EFFECTS}
    assert {f"quarter {effect}" for effect in plain.EFFECTS} == set(thrifty)
    for found in (swept, thrifty):
        assert max(plain.distance(found, {name: ours[name] for name in found}).values()) < 1e-4
    assert len(np.unique(swept["every kl"].round(6))) > len(task.changes) // 2  # what is compared is not all the same


def test_another_change_or_another_position_is_noticed(measured: Any) -> None:
    checkpoint, task, ours = measured
    swept = numbers_of(ByHand(checkpoint), "sweep", task)
    entry = {"checkpoint": "a", "distance": {}}
    benchmark.agree(entry, ours, {"x sweep": swept})
    for name in swept:
        moved = {key: np.roll(values, 1, axis=0) if key == name else values for key, values in swept.items()}
        with pytest.raises(OutputError, match=name):
            benchmark.agree({"checkpoint": "a", "distance": {}}, ours, {"x sweep": moved})
    lost = swept | {"every kl": np.full_like(swept["every kl"], math.nan)}
    with pytest.raises(OutputError, match="every kl"):
        benchmark.agree({"checkpoint": "a", "distance": {}}, ours, {"x sweep": lost})


SECONDS = {
    "transformers forward": {"forward": 10.0},
    "depthprobe probes": {"probes": 12.0},
    "nnsight capture": {"states": 10.5},
    "nnsight statistics": {"states": 10.5, "statistics": 1.5},
    "nnsight stopped": {"states": 8.0, "statistics": 1.5},
    "depthprobe quarter": {"quarter": 6.0},
    "depthprobe every": {"every": 7.0},
    "nnsight sweep": {"forward": 10.0, "quarter": 2.0, "every": 4.0},
    "nnsight thrifty": {"thrifty": 9.0},
}


def fresh() -> dict[str, Any]:
    return {
        "checkpoint": "data/some-model",
        "captured": [4, 64],
        "swept": [1, 64],
        "schedules": 10,
        "forward_seconds_a_token": 1e-3,
        "verified": 1.5,
        "tools": {"nnsight": {"wrapped": 0.5}, "transformer_lens": {"refused": "ValueError: no"}},
    }


def answers(slower: dict[str, list[float]] | None = None) -> Any:
    """What a tool answers; a run listed in `slower` takes so many times its seconds, one round after another."""
    asked: dict[str, int] = {}

    def ask(tool: str, what: str) -> Any:
        name = f"{tool} {what}"
        if name not in SECONDS:
            return None
        factor = (slower or {}).get(name, [1.0] * 9)[asked.get(name, 0)]
        asked[name] = asked.get(name, 0) + 1
        return {part: [seconds * factor, seconds * 2] for part, seconds in SECONDS[name].items()}, 100, None

    return ask


def found_of(entry: dict[str, Any]) -> dict[str, Any]:
    machine = {"cpu": "A processor", "threads": 2, "cores": 2, "load": 0.1}
    return {"machine": machine, "versions": {"depthprobe": "1"}, "repeats": 3, "checkpoints": [entry]}


def rows_of(entry: dict[str, Any]) -> dict[tuple[str, str], Any]:
    return {(row["group"], row["words"]): row for row in report.compared(entry)}


def test_ratios_are_those_of_each_round() -> None:
    entry = fresh()
    slower = {"transformers forward": [1.0, 2.0, 0.5], "depthprobe probes": [1.0, 2.0, 1.0]}
    benchmark.take_turns(entry, answers(slower), 3, lambda: None, lambda line: None)
    rows = rows_of(entry)
    probes = rows["per forward pass", "depthprobe: `analyze`'s probes"]
    assert probes["clock"] == {"ratio": 1.2, "low": 1.2, "high": 2.4}
    assert probes["cpu"] == {"ratio": 1.2, "low": 1.2, "high": 1.2}
    assert probes["clock_seconds"] == [12.0, 10.0]
    ratios = {words: row["cpu"]["ratio"] for (group, words), row in rows.items() if group == "sweep against"}
    assert ratios == {
        "nnsight: a quarter of the positions scored": 6 / 12,
        "nnsight: every position scored": 7 / 14,
        "nnsight: a quarter, the head given no other position": 6 / 9,
    }
    assert rows["probes against", "nnsight: block outputs and statistics, no head"]["cpu"]["ratio"] == 12 / 9.5
    assert not any("TransformerLens" in words for _, words in rows)  # which did not open this checkpoint


def test_all_take_turns_and_another_begins_each_round() -> None:
    entry, lines, asked = fresh(), [], []
    ask = answers()

    def noted(tool: str, what: str) -> Any:
        asked.append(f"{tool} {what}")
        return ask(tool, what)

    kept: list[int] = []
    benchmark.take_turns(entry, noted, 2, lambda: kept.append(len(asked)), lines.append)
    runs = [run.name for run in benchmark.RUNS]
    captures = [run.name for run in benchmark.RUNS if run.group == "captures"]
    assert asked[: len(captures)] == captures
    assert asked[len(captures) : 2 * len(captures)] == captures[1:] + captures[:1]
    assert sorted(asked) == sorted(2 * runs)
    assert len(lines) == 2 * len(SECONDS)
    assert len(kept) >= len(lines)  # what is there is kept after every run
    assert lines[0].startswith("  captures 1 of 2: transformers forward 10.00 s, CPU 20.00 s; about ")
    assert lines[-1].endswith("about 0 s left")


def test_a_run_that_is_stopped_keeps_what_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry, out = fresh(), tmp_path / "benchmark.json"
    found, ask, left = found_of(entry), answers(), iter(range(3))

    def stopping(tool: str, what: str) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return ask(tool, what)

    with pytest.raises(KeyboardInterrupt):
        benchmark.take_turns(entry, stopping, 2, lambda: benchmark.write(found, out), lambda line: None)
    kept = json.loads(out.read_text())["checkpoints"][0]
    assert list(kept["rounds"]["captures"][0]) == ["transformers forward", "depthprobe probes", "nnsight capture"]
    figure = tmp_path / "figures" / "benchmark.png"
    assert benchmark.main(["--show", str(out), "--figure", str(figure)]) == 0
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert "| nnsight: block outputs | 1.05 (1.05 to 1.05) |" in capsys.readouterr().out


def test_tables_say_what_held_and_where_depthprobe_is_behind(tmp_path: Path) -> None:
    entry, out = fresh(), tmp_path / "benchmark.json"
    found = found_of(entry)
    benchmark.take_turns(entry, answers(), 3, lambda: benchmark.write(found, out), lambda line: None)
    entry["distance"] = {"nnsight sweep": {"kl": 2e-6}}
    said = report.text(found, found["checkpoints"])
    for line in (
        "| depthprobe: `analyze`'s probes | 1.20 (1.20 to 1.20) |",
        "| TransformerLens: `run_with_cache` | – |",
        "| nnsight: a quarter of the positions scored | 0.50 (0.50 to 0.50) |",
        "- some-model: TransformerLens does not open it (ValueError: no).",
        "- some-model: the tools' numbers are at most 2e-06 from depthprobe's, relatively.",
        "- some-model: depthprobe is slower than nnsight: block outputs (1.14); nnsight: block outputs and statistics, "
        "no head (1.26).",
    ):
        assert line in said.splitlines()
    words = [line.split(":")[0] for line in said.splitlines() if line.endswith(("1.25", "0.5", "0.65"))]
    assert words == ["- held", "- held", "- held"]
    slower = fresh()
    benchmark.take_turns(slower, answers({"depthprobe quarter": [1.1] * 3}), 3, lambda: None, lambda line: None)
    slower["comparisons"] = report.compared(slower)
    assert "- MISSED: sweep against nnsight: a quarter of the positions scored 0.550" in report.text(found, [slower])


class Fake:
    package = "torch"
    wrapped = 0.25

    def __init__(self, checkpoint: str) -> None:
        if checkpoint == "another":
            raise ValueError("no such architecture. There are 100 others:\nall of them")

    def task(self, *given: Any) -> Any:
        return given, {"parameters": 3}

    def add(self, task: Any, watch: Any) -> Any:
        with watch("first"), watch("second"):
            return {"sum": np.array([sum(task)])}


def test_a_process_answers_until_it_is_told_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tools.TOOLS, "fake", Fake)
    ours, theirs = Pipe()
    thread = threading.Thread(target=tools.serve, args=(theirs, "fake", "some", torch.get_num_threads()))
    thread.start()
    assert ours.recv() == ("ready", {"version": torch.__version__, "wrapped": 0.25})
    ours.send(("make task", (2, 3)))
    assert ours.recv() == ("done", (2, 3), {"parameters": 3})
    ours.send(("add", None))
    done, times, _, numbers = ours.recv()
    assert (done, list(times), numbers["sum"]) == ("done", ["second", "first"], 5)
    assert times["first"][0] >= times["second"][0] > 0
    ours.send(None)
    thread.join(10)
    assert not thread.is_alive()
    tools.serve(theirs, "fake", "another", torch.get_num_threads())
    assert ours.recv() == ("refused", "ValueError: no such architecture")


def test_without_the_other_tools_it_says_where_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(benchmark.importlib.util, "find_spec", lambda name: None)
    assert benchmark.main(["--out", str(tmp_path / "out.json")]) == 2
    assert "make benchmark" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in report.HOOKED),
    reason="nnsight and TransformerLens have an environment of their own: run this file in .bench-venv",
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "more"), [("Nnsight", ["stopped"]), ("TransformerLens", [])])
def test_other_tools_come_to_the_same_numbers(measured: Any, name: str, more: list[str]) -> None:
    checkpoint, task, ours = measured
    if name == "TransformerLens" and "checkpoints" in checkpoint:
        with pytest.raises(ValueError, match="supported architecture"):
            tools.TransformerLens(checkpoint)
        return
    tool = getattr(tools, name)(checkpoint)
    for what in ("statistics", "sweep", "thrifty", *more):
        found = numbers_of(tool, what, task)
        assert max(plain.distance(found, {key: ours[key] for key in found}).values()) < benchmark.TOLERANCE / 10
