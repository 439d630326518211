"""The models in data/known-depth: each does its task, and is the smallest that the table of runs has for it."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from depthprobe.lab.model import LabForCausalLM
from depthprobe.lab.task_training import LEARNED, accuracy
from depthprobe.lab.tasks import make_task

DATA = Path(__file__).resolve().parents[1] / "data"
MODELS = sorted(path.parent for path in DATA.glob("known-depth/*/*/config.json"))
LEAST = [path for path in MODELS if not path.name.endswith("-deep")]


def placement(folder: Path) -> str:
    return folder.name.removesuffix("-deep")


def runs() -> list[dict[str, str]]:
    with (DATA / "results" / "known_depth.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_what_one_block_remembers_is_that_of_the_table() -> None:
    """All answers together are a third each after one letter, two and three; no share is above 1."""
    least = [
        3 * float(run["accuracy_all"]) - 1 - float(run["accuracy"])
        for run in runs() if (run["task"], run["k"], run["blocks"]) == ("moves", "3", "1")
    ]  # fmt: skip
    text = (DATA / "known-depth" / "README.md").read_text()
    assert f"at least {min(least):.2f} to {max(least):.2f} of the answers after two letters" in text


def test_there_are_some_of_both_placements() -> None:
    assert {path.name for path in LEAST} == {"pre", "post"}
    assert len(LEAST) >= 6


@pytest.mark.parametrize("folder", MODELS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_it_does_its_task(folder: Path) -> None:
    name, _, k = folder.parent.name.partition("-")
    task = make_task(name, int(k))
    model = LabForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.config.placement == placement(folder)
    assert accuracy(model, task)[0] >= LEARNED - 0.002  # the weights were rounded since
    ids, labels = task.validation
    np.testing.assert_array_equal(np.load(folder.parent / "ids.npy"), ids)
    np.testing.assert_array_equal(np.load(folder.parent / "labels.npy"), labels)


@pytest.mark.parametrize("folder", LEAST, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_less_blocks_were_tried_with_as_many_updates(folder: Path) -> None:
    name, _, k = folder.parent.name.partition("-")
    blocks = LabForCausalLM.from_pretrained(folder).config.num_hidden_layers
    mine = [r for r in runs() if (r["task"], r["k"], r["placement"]) == (name, k, folder.name)]
    assert any(r["status"] == "learned" for r in mine if int(r["blocks"]) == blocks)
    fewer = [r for r in mine if int(r["blocks"]) == blocks - 1]
    assert all(r["status"] == "not learned" and r["steps"] == r["budget"] for r in fewer)
    assert len({r["seed"] for r in fewer}) >= 2 or blocks == 1
    assert len({r["budget"] for r in mine}) == 1


@pytest.mark.parametrize("folder", [path for path in MODELS if path not in LEAST], ids=lambda path: path.parent.name)
def test_a_deeper_model_has_more_blocks_than_needed(folder: Path) -> None:
    deep, least = (
        LabForCausalLM.from_pretrained(path).config.num_hidden_layers
        for path in (folder, folder.with_name(placement(folder)))
    )
    assert deep > least
