"""The checkpoints in data/checkpoints: matched in all but the norms, and what they say they are."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from depthprobe.lab.config import LabConfig
from depthprobe.lab.parameters import parameter_difference, parameters_by_part
from depthprobe.prepare import prepare

HOME = Path(__file__).resolve().parents[1] / "data" / "checkpoints"
PLACEMENTS = ("pre", "post", "branch", "sandwich")
TUNED = ("lr", "warmup")


def record(placement: str) -> dict[str, Any]:
    return json.loads((HOME / placement / "run.json").read_text())


def rows(name: str) -> list[dict[str, str]]:
    with (HOME / name).open(newline="") as file:
        return list(csv.DictReader(file))


def config(placement: str) -> LabConfig:
    return LabConfig.from_pretrained(HOME / placement)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_placement_is_concluded_from_tensors(placement: str) -> None:
    checkpoint, _, anatomy = prepare(str(HOME / placement), tokens=256)
    assert checkpoint.dtype == torch.float32
    assert {tensor.dtype for tensor in load_file(HOME / placement / "model.safetensors").values()} == {torch.float16}
    assert all(check.passed for check in anatomy.checks)
    assert len(anatomy.checks) == 3
    found = {(branch.unit, branch.placement) for block in anatomy.blocks for branch in block.branches}
    assert found == {("attention", placement), ("mlp", placement)}
    assert anatomy.objective == "causal"


def test_all_saw_the_same_batches() -> None:
    first = record("pre")
    for other in map(record, PLACEMENTS):
        for part in ("text", "versions", "processes", "threads", "device", "start"):
            assert other[part] == first[part], part
        assert {k: v for k, v in other["settings"].items() if k not in TUNED} == {
            k: v for k, v in first["settings"].items() if k not in TUNED
        }
        assert other["result"]["tokens"] == first["result"]["tokens"]
        assert other["status"] == other["result"]["status"] == "done"


def test_sizes_differ_by_the_norms_alone() -> None:
    for placement in PLACEMENTS:
        assert set(parameter_difference(config("pre"), config(placement))) <= {"norms"}
        assert sum(parameters_by_part(config(placement)).values()) == record(placement)["result"]["parameters"]
        odd = {"placement"}
        one, other = config("pre").to_dict(), config(placement).to_dict()
        assert {name for name in one if one[name] != other[name]} <= odd


def test_each_is_at_its_best_point_of_the_same_grid() -> None:
    grid = rows("grid.csv")
    points = {
        p: [(r["lr"], r["warmup"], r["steps"], r["seed"]) for r in grid if r["placement"] == p] for p in PLACEMENTS
    }
    assert len(points["pre"]) == len(set(points["pre"])) == 8
    # A run that diverged ended early
    whole = {p: {point[:2] + point[3:] for point in points[p]} for p in PLACEMENTS}
    assert all(whole[placement] == whole["pre"] for placement in PLACEMENTS)
    for placement in PLACEMENTS:
        done = [row for row in grid if row["placement"] == placement and row["status"] == "done"]
        best = min(done, key=lambda row: float(row["val_loss"]))
        settings = record(placement)["settings"]
        assert (settings["lr"], settings["warmup"]) == (float(best["lr"]), int(best["warmup"]))
        assert settings["seed"] != int(best["seed"])


def test_readme_has_the_losses_of_the_records() -> None:
    text = (HOME / "README.md").read_text()
    for placement in PLACEMENTS:
        result, settings = record(placement)["result"], record(placement)["settings"]
        line = f"| {placement} | {result['parameters']:,} | {settings['lr']:g} | {settings['warmup']} "
        assert f"{line}| {result['val_loss']:.3f} |" in text


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_loss_is_that_of_the_record(placement: str) -> None:
    """On fresh text, whose loss need not be the same, and after rounding: near it, and far below the unigram's."""
    checkpoint, corpus, _ = prepare(str(HOME / placement), tokens=4096)
    with torch.no_grad():
        loss = checkpoint.model(input_ids=corpus.inputs, labels=corpus.inputs).loss.item()
    result = record(placement)["result"]
    assert result["val_loss"] - 0.5 < loss < result["unigram"] - 0.5
