"""Studies of what models do with their depth: rows are plain arithmetic, and verdicts follow from the rows."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, log_softmax

from depthprobe.ablations.run import SweepSettings, sweep
from depthprobe.ablations.table import merge_against_skip
from depthprobe.contrast import over_seeds, smallest_effect
from depthprobe.errors import OutputError, UsageError
from depthprobe.estimate import Resampler
from depthprobe.lab.byte_tokens import byte_tokenizer
from depthprobe.lab.runlog import save_model

ROOT = Path(__file__).parent.parent
BLOCKS = 3
NAMED = f"pre-{BLOCKS}-16-adamw-0.001-3-30-1"  # the folder of a trained model


def script(name: str) -> ModuleType:
    """Scripts import each other as they do where they are run: from their own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "analyses"))
        return importlib.import_module(name)


runs, study, models = script("runs"), script("study"), script("models")
growth, twins = script("growth"), script("merge_twins")
pairs = script("parallel_pairs")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few tokens, few seeds, and for a public model one that was trained here."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(growth, "TOKENS", 256)
    monkeypatch.setattr(twins, "TOKENS", 128)
    monkeypatch.setattr(growth, "PUBLIC", {"small": ("pre", NAMED, BLOCKS)})
    monkeypatch.setattr(growth, "INITIALISATIONS", 2)
    monkeypatch.setattr(models, "SEEDS", (1, 2))
    monkeypatch.setattr(pairs, "SIZE", {"blocks": BLOCKS, "width": 16, "steps": 30})
    yield
    torch.set_num_threads(threads)


def model_of(placement: str, seed: int) -> nn.Module:
    """A narrow model whose norms have gains and shifts, as after training."""
    model = models.fresh(placement, BLOCKS, seed, width=16)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for norm in (part for part in model.modules() if isinstance(part, nn.LayerNorm)):
            norm.weight.uniform_(0.5, 1.5, generator=draw)
            norm.bias.uniform_(-0.2, 0.2, generator=draw)
    return model.eval()


# Rows of growth.py


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_rows_are_those_of_a_plain_computation(placement: str) -> None:
    model = model_of(placement, 1)
    opened = models.opened(model, 256)
    table = growth.rows_of(*opened)
    with torch.no_grad():
        found, states, coefficients = by_hand(model, opened[1].inputs)
    assert len(found) == 5 * BLOCKS + 2 * 6 * BLOCKS + 2 * (BLOCKS - 1) - (BLOCKS - 1)
    for (layer, unit, metric), value in found.items():
        row = table[(table["layer"] == layer) & (table["unit"] == unit)]
        assert row[metric].item() == pytest.approx(value, rel=1e-4, abs=1e-6), (layer, unit, metric)
    block = table[table["unit"] == "block"].set_index("layer")
    norms = [mean(x.norm(dim=-1)) for x in states]
    np.testing.assert_allclose(block["residual_norm"], norms, rtol=1e-5)
    np.testing.assert_allclose(block["start_coefficient"], coefficients, rtol=1e-4)
    whole = table[table["unit"] == "model"].iloc[0]
    assert whole["norms"] == (2 * BLOCKS if placement == "post" else 0)
    slope = np.polyfit(np.log(range(1, BLOCKS + 1)), np.log(norms[1:]), 1)[0]
    assert whole["growth_power"] == pytest.approx(slope, rel=1e-4)
    energy = [mean(x.square().sum(dim=-1)) for x in states]
    cross = [2 * mean(((z - x) * x).sum(dim=-1)) for x, z in itertools.pairwise(states)]
    assert whole["cross_share"] == pytest.approx(sum(cross) / (energy[-1] - energy[0]), rel=1e-3)
    assert list(table["unit"]) == ["block", "attention", "mlp"] * BLOCKS + ["block", "model"]


def by_hand(model: nn.Module, ids: Tensor) -> tuple[dict[tuple[int, str, str], float], list[Tensor], list[float]]:
    """Metrics by layer and unit, states, and the coefficient of x_0 in each."""
    inner, found = model.model, {}
    x = inner.token_embedding(ids) + inner.position_embedding.weight[: ids.shape[1]]
    states, left, coefficients = [x], x, [1.0]
    for layer, block in enumerate(inner.blocks):
        z, kept = x, left
        for unit, skip in (("attention", block.attention_skip), ("mlp", block.mlp_skip)):
            given = skip.read(z)
            u = block.attention(given, None, None)[0] if unit == "attention" else block.mlp(given)
            found |= {(layer, unit, name): value for name, value in parts(z, u).items()}
            z = z + u
            if skip.norm_after is not None:
                spread = (z.var(dim=-1, keepdim=True, unbiased=False) + skip.norm_after.eps).sqrt()
                kept = skip.norm_after.weight * (kept - kept.mean(dim=-1, keepdim=True)) / spread
                z = skip.norm_after(z)
        found |= {(layer, "block", name): value for name, value in parts(x, z - x).items() if name != "update_share"}
        found[layer, "block", "block_influence"] = mean(1 - cosine_similarity(x, z, dim=-1))
        del found[layer, "block", "update_energy_share"]
        if layer:
            blind = block(states[layer - 1]) - states[layer - 1]
            error = (z - x - blind).norm(dim=-1) / (z - x).norm(dim=-1)
            found[layer - 1, "block", "interaction_error"] = mean(error)
        x, left = z, kept
        states.append(x)
        coefficients.append(mean((left * states[0]).sum(dim=-1) / states[0].square().sum(dim=-1)))
    return found, states, coefficients


def parts(s: Tensor, u: Tensor) -> dict[str, float]:
    y, ratios = s + u, u.norm(dim=-1) / s.norm(dim=-1)
    medians = np.median(ratios[:, 1:].numpy(), axis=1)
    return {
        "update_norm": mean(u.norm(dim=-1)),
        "update_ratio": mean(ratios),
        "update_ratio_median": float(medians.mean()),
        "update_share": mean((u * y).sum(dim=-1) / y.square().sum(dim=-1)),
        "update_energy_share": mean(u.square().sum(dim=-1) / y.square().sum(dim=-1)),
        "update_alignment": mean(cosine_similarity(u, s, dim=-1)),
    }


def mean(values: Tensor) -> float:
    """Over tokens, position 0 left out, and sequences."""
    return float(values[:, 1:].double().mean())


def test_the_same_rows_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of two initialisations come again, and nothing that was drawn before matters."""
    monkeypatch.setattr(growth, "TOKENS", 8192)
    torch.set_num_threads(1)
    torch.manual_seed(99)
    table = growth.load(ROOT / "data" / "results" / "growth.csv")
    job = ("init", "post", "lab", growth.BLOCKS, 3, "start")
    there = study.arm(table, source="init", arm="post", seed=3).drop(columns=[*growth.KEYS])
    again = pd.DataFrame(growth.Measure(None, Path())(*job), columns=there.columns)
    assert list(again["unit"]) == list(there["unit"])
    numeric = [name for name in there.columns if name not in ("unit", "r2_power")]  # post-LN's is that of rounding
    np.testing.assert_allclose(again[numeric], there[numeric], rtol=1e-3, atol=1e-5)  # sums differ between machines


def test_what_was_measured_before_training() -> None:
    table = growth.load(ROOT / "data" / "results" / "growth.csv")
    init = study.arm(table, source="init", at="start")
    assert dict(init.groupby("arm")["seed"].nunique()) == {"pre": 10, "post": 10}
    assert set(init.groupby(["arm", "seed"]).size()) == {3 * growth.BLOCKS + 2}
    norms = table[table["unit"] == "model"].groupby(["source", "arm"])["norms"].unique()
    assert {key: list(value) for key, value in norms.items() if key[0] != "trained"} == {
        ("init", "pre"): [0], ("init", "post"): [24], ("public", "pre"): [0], ("public", "post"): [12],
    }  # fmt: skip


# Trained models


LOSSES = {  # of every checkpoint; the last is the end's
    ("pre", 1): (5.0, 4.0, 2.0, 1.0), ("post", 1): (5.0, 4.0, 3.5, 2.5),
    ("pre", 2): (5.0, 3.0, 4.0, 3.0), ("post", 2): (5.0, 4.0, 3.0, 2.0),
}  # fmt: skip
STEPS = (0, 10, 20, 30)
SWAPPED = 0.0003  # post-LN's learning rate


@pytest.fixture(scope="module")
def trained_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of runs, and their folders as training leaves them: made-up models and losses."""
    home = tmp_path_factory.mktemp("trained")
    rates = {"pre": 0.001, "post": SWAPPED}
    jobs = [runs.Run("confirm", arm, BLOCKS, 16, "adamw", rates[arm], 3, 30, seed) for arm, seed in sorted(LOSSES)]
    for place, run in enumerate(jobs):
        folder = home / "work" / run.name
        for step, loss in zip(STEPS, LOSSES[run.arm, run.seed], strict=True):
            model = model_of(run.arm, 100 * place + step)
            save_model(model, byte_tokenizer(positions=64), folder if step == 30 else folder / f"step-{step}")
            line = {"step": step, "loss": 9.0, "val_loss": loss}
            with (folder / "log.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n" + json.dumps({"step": step + 1, "val_loss": None}) + "\n")
    outcome = ["done", 2.0, 2.1, 3.1, 1000, 9000, ""]

    def write(name: str, made: list[object]) -> None:
        rows = [[getattr(run, name) for name in run.__dataclass_fields__] + outcome for run in made]
        pd.DataFrame(rows, columns=runs.COLUMNS).to_csv(home / name, index=False)

    write("runs.csv", jobs)
    swapped = [runs.Run("swapped", "pre", BLOCKS, 16, "adamw", SWAPPED, 3, 30, seed) for seed in (1, 2)]
    for run in swapped:
        folder = home / "work" / run.name
        for step in (0, 30):
            model = model_of("pre", 1000 * run.seed + step)
            save_model(model, byte_tokenizer(positions=64), folder if step else folder / "step-0")
        lines = [{"step": step, "val_loss": loss} for step, loss in ((0, 5.0), (30, 2.25))]
        (folder / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    away = [runs.Run("swapped", arm, BLOCKS, 16, "adamw", lr, 3, 30, 1) for arm, lr in (("pre", 0.5), ("post", 0.001))]
    write("swapped.csv", [*jobs, *swapped, *away])
    return home


def trained(home: Path, table: str = "runs.csv") -> object:
    return models.Trained(home / table, home / "work", BLOCKS)


def test_equal_loss_is_the_higher_of_the_last_losses_at_its_last_crossing(trained_runs: Path) -> None:
    found = trained(trained_runs)
    place = found.place("pre", 1, "loss")  # down to post's 2.5: between 4 and 2
    assert [(point.step, weight) for weight, point in place.points] == [(10, 0.25), (20, 0.75)]
    for arm, seed in (("post", 1), ("pre", 2)):
        assert found.place(arm, seed, "loss") == found.place(arm, seed, "end")
    line = [models.Point(step, loss) for step, loss in zip((0, 10, 20, None), (5.0, 3.0, 4.0, 1.0), strict=True)]
    assert models.enclosing(line, 3.5) == models.Place(line[2], line[3], pytest.approx(1 / 6))
    with pytest.raises(OutputError, match=r"no two checkpoints enclose a loss of 0\.5"):
        models.enclosing(line, 0.5)


def test_rows_at_equal_loss_lie_between_those_of_two_checkpoints(trained_runs: Path) -> None:
    found = trained(trained_runs)
    first, second = (
        growth.checkpoint_rows(found, found.runs["pre", 1], models.Point(step, loss))
        for step, loss in ((10, 4.0), (20, 2.0))
    )
    job = ("trained", "pre", found.runs["pre", 1].name, BLOCKS, 1, "loss")
    mixed = pd.DataFrame(growth.Measure(found, Path())(*job), columns=first.columns)
    for metric in ("residual_norm", "interaction_error", "growth_power"):
        np.testing.assert_allclose(mixed[metric], 0.25 * first[metric] + 0.75 * second[metric])
    assert mixed["residual_norm"].notna().sum() == BLOCKS + 1
    assert (first["residual_norm"] - second["residual_norm"]).abs().max() > 0.1
    last = mixed.iloc[-1]
    assert (last["step"], last["val_loss"]) == (17.5, pytest.approx(2.5))
    assert growth.checkpoint_rows(found, found.runs["pre", 1], models.Point(None, 1.0)).iloc[-1]["step"] == 30


def test_a_run_made_again_is_compared_with_its_row(
    trained_runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = trained(trained_runs)
    run = found.runs["pre", 1]
    folder, kept = trained_runs / "work" / run.name, trained_runs / "kept"
    end = runs.loss(runs.model_of(run, trained_runs / "work"), *runs.halves()["test"])
    shutil.copytree(folder, kept, dirs_exist_ok=True)
    monkeypatch.setattr(runs, "perform", lambda *_: shutil.copytree(kept, folder))
    for loss, said in ((end, False), (end + 1e-3, True)):
        shutil.rmtree(folder)
        found.losses[run] = loss
        assert found.place("pre", 1, "end").points[0][1].step is None
        assert ("was made again and ends with a loss of" in capsys.readouterr().err) is said
    assert found.place("pre", 1, "end").weight == 1.0  # once there it is taken as it is
    assert not capsys.readouterr().err


def test_pre_at_the_setting_of_post_is_measured_last_at_its_end(trained_runs: Path) -> None:
    """Not its swapped runs at another setting, nor post-LN's; and not before all other models are there."""
    found = trained(trained_runs, "swapped.csv")
    jobs = found.jobs()
    assert jobs[:-2] == trained(trained_runs).jobs()
    assert jobs[-2:] == [("pre", found.matched[seed].name, BLOCKS, seed, "matched") for seed in (1, 2)]
    assert all(run.lr == SWAPPED and run.arm == "pre" for run in found.matched.values())
    assert {run.lr for run in found.runs.values() if run.arm == "post"} == {SWAPPED}
    rows = pd.DataFrame(growth.Measure(found, Path())("trained", *jobs[-1]), columns=growth.COLUMNS[len(growth.KEYS) :])
    plain = growth.rows_of(*models.opened(runs.model_of(found.matched[2], trained_runs / "work"), 256))
    numeric = [name for name in rows if name not in ("unit", "step", "val_loss")]
    np.testing.assert_allclose(rows[numeric], plain[numeric])
    assert rows.iloc[-1]["val_loss"] == 2.25
    costs = pd.DataFrame(twins.RhoRows(found)(*jobs[-1]), columns=twins.RHO_COLUMNS[len(twins.KEYS) :])
    np.testing.assert_allclose(costs["kl"], twins.rho_rows(found.model(found.matched[2], models.Point(None, 0)))["kl"])
    assert not np.allclose(costs["kl"], twins.rho_rows(found.model(found.runs["pre", 2], models.Point(None, 0)))["kl"])
    table = pd.read_csv(trained_runs / "swapped.csv")
    table[table["stage"].eq("swapped") | table["seed"].eq(1)].to_csv(trained_runs / "fewer.csv", index=False)
    assert "matched" not in {job[-1] for job in trained(trained_runs, "fewer.csv").jobs()}
    table.assign(status=np.where(table["stage"] == "swapped", "failed", "done")).to_csv(trained_runs / "lost.csv")
    pd.read_csv(trained_runs / "lost.csv", index_col=0).to_csv(trained_runs / "lost.csv", index=False)
    lost = trained(trained_runs, "lost.csv")
    assert [row[1] for row in growth.Measure(lost, Path())("trained", *jobs[-1])] == ["failed"]
    assert [row[2] for row in twins.RhoRows(lost)(*jobs[-1])] == ["failed"]
    assert lost.jobs() == jobs


def test_seeds_that_one_arm_lacks_wait_and_are_named(trained_runs: Path) -> None:
    table = pd.read_csv(trained_runs / "runs.csv")
    table[:3].to_csv(trained_runs / "some.csv", index=False)  # post 1, post 2, pre 1
    found = trained(trained_runs, "some.csv")
    assert found.seeds == [1]
    assert [job[0::3] for job in found.jobs()] == [("pre", 1), ("pre", 1), ("post", 1), ("post", 1)]
    with pytest.raises(OutputError, match=r"has no confirmation runs of 3 blocks for pre 2.*seeds 1, 2"):
        found.require()
    with pytest.raises(OutputError, match=r"none\.csv is not there: no confirmation runs.* for pre 1, post 1, pre 2"):
        trained(trained_runs, "none.csv").require()
    table.assign(status=["done", "done", "failed", "done"]).to_csv(trained_runs / "failed.csv", index=False)
    jobs = [job[0::2] + job[4:] for job in trained(trained_runs, "failed.csv").jobs()]
    assert [(arm, at) for arm, *_, at in jobs][:2] == [("pre", "end"), ("post", "end")]
    assert len(jobs) == 6


# Verdicts of growth.py


def made_up(seeds: int = 2, noise: float = 1e-3) -> pd.DataFrame:
    """All four claims hold: ‖x_l‖ is l, 1 − cos and the interaction error fall, and every norm halves ‖x_0‖²."""
    rng, lines = np.random.default_rng(0), []
    for source, arm, at in (("init", "pre", "start"), ("init", "post", "start"), ("trained", "pre", "end"),
                            ("trained", "post", "end"), ("public", "pre", "end")):  # fmt: skip
        for seed in range(1, seeds + 1) if source != "public" else [0]:
            name = "small" if source == "public" else "x"
            keys = {"source": source, "arm": arm, "name": name, "blocks": 12, "seed": seed, "at": at}

            def near() -> float:
                return math.exp(rng.normal(0, noise))

            for layer in range(13):
                row = keys | {"layer": layer, "unit": "block", "start_share": 2.0**-layer}
                row |= {name: max(layer, 0.5) * near() for name in ("residual_norm", "residual_norm_median")}
                row |= {"start_coefficient": 2.0**-layer * near()}
                if layer < 12:
                    row |= {"update_norm": near(), "update_alignment": 0.9 * near()}
                    row |= {
                        name: 2.0**-layer * near()
                        for name in ("update_ratio_median", "update_ratio", "block_influence")
                    }
                    lines += [keys | {"layer": layer, "unit": unit, "update_energy_share": 0.5 * near()}
                              for unit in ("attention", "mlp")]  # fmt: skip
                if layer < 11:  # the last block is read by none
                    row |= {"interaction_error": 0.3 / (layer + 1) * near(), "interaction_error_control": 0.9}
                lines.append(row)
            model = {"growth_power": near(), "r2_power": 0.99, "cross_share": 0.8 * near(), "val_loss": 2.0}
            model |= {"norms": 24.0 if arm == "post" else 0.0}
            lines.append(keys | model | {"layer": 0, "unit": "model"})
    return pd.DataFrame(lines).reindex(columns=[*growth.COLUMNS])


def said(table: pd.DataFrame) -> dict[str, str]:
    return {test.claim: word for test, _, word in study.adjusted(growth.primary(table))}


def test_verdicts_of_a_table_with_known_answers(tmp_path: Path) -> None:
    table = made_up()
    assert said(table) == dict.fromkeys(("R1", "R2", "M1", "D2"), "supported")
    tests = {test.claim: test for test in growth.primary(table)}
    assert np.mean(tests["R2"].values) == pytest.approx(-8 * math.log(2), abs=0.01)  # middles of thirds are 8 apart
    assert np.mean(tests["M1"].values) == pytest.approx(
        np.median(0.3 / np.arange(9, 12)), rel=0.02
    )  # the last has none
    assert np.mean(tests["D2"].values) == pytest.approx(-0.5, abs=1e-3)
    assert tests["R1"].values == tuple(
        table.loc[(table["source"] == "trained") & (table["arm"] == "pre"), "growth_power"].dropna()
    )
    text = told(growth, table, tmp_path)
    assert re.findall(r"^\| (\w\d) \| \*\*(\w+)\*\*", text, re.MULTILINE) == [
        (claim, "supported") for claim in growth.CLAIMS
    ]
    assert "| ‖u‖/‖y‖ of the MLP | 0.707" in text
    near = r"0\.(80|79)\d"  # post-LN's cells stay empty, and a single model has no interval
    seeds = rf" {near} \[[^|]*\] \([^|]*\) inside \|  \|"
    assert re.search(rf"R1: updates point along the stream[^|]*\|{seeds}{seeds} {near} \|\n", text)
    assert "| init pre, 2 seeds | init post, 2 seeds |" in text
    assert "compared at their own learning rates" in text
    flat = table.assign(growth_power=np.where(table["arm"] == "post", 1e-8, table["growth_power"]))
    assert re.search(r"R² of that, where anything grows \| 0\.990[^|]*\|  \| 0\.990", growth.more(flat))
    power = [each.iloc[-1]["growth_power"] for _, each in study.arm(table, source="init", arm="pre").groupby("seed")]
    cell = f"{study.span(over_seeds(power))} ({study.number(smallest_effect(2) * np.std(power, ddof=1))})"
    assert f"| exponent of ‖x_l‖ over l, whether it fits or not | {cell} |" in text


def test_pre_at_the_setting_of_post_stands_beside(tmp_path: Path) -> None:
    table = made_up()
    ours = table[(table["source"] == "trained") & (table["arm"] == "pre")]
    matched = ours.assign(at="matched", name="y", growth_power=ours["growth_power"] + 5)
    text = told(growth, pd.concat([table, matched]), tmp_path)
    heads = next(line for line in text.splitlines() if line.startswith("| criterion")).split(" | ")
    place = heads.index("trained pre, post-LN's setting, 2 seeds")
    (row,) = (line.split(" | ") for line in text.splitlines() if "whether it fits or not" in line)
    assert row[place].startswith("6.00 [")
    assert "compared at their own learning rates" not in text
    assert said(pd.concat([table, matched])) == said(table)


def test_which_seeds_a_power_law_does_not_fit() -> None:
    table = made_up(3)
    worse = (table["source"] == "trained") & (table["seed"] < 3)
    text = growth.overview(table.assign(r2_power=np.where(worse, 0.7 + table["seed"] / 100, table["r2_power"])))
    assert "| 2 of 3 seeds: R² 0.710 and 0.720, 0.8 needed |" in text


def told(module: ModuleType, table: pd.DataFrame, folder: Path) -> str:
    """The part of the README that a table gives, its figures drawn."""
    table.to_csv(folder / ("growth.csv" if module is growth else twins.RHO), index=False)
    section = module.section(folder, blocks=12)
    study.write_figures(section, folder)
    assert all((folder / f"{figure.name}.png").stat().st_size > 10_000 for figure in section.figures)
    assert {test.claim for test in section.tests} == {*section.minds}
    return section.text(study.adjusted(section.tests))


def test_verdicts_follow_the_rows() -> None:
    table = made_up()
    wrong = table.assign(
        growth_power=table["growth_power"] / 2, block_influence=1.0,
        interaction_error=table["interaction_error"] * 5, start_coefficient=table["start_coefficient"] ** 0.5,
    )  # fmt: skip
    assert said(wrong) == dict.fromkeys(("R1", "R2", "M1", "D2"), "contradicted")
    assert said(table.assign(r2_power=0.5))["R1"] == "cannot be judged here"
    assert "least R² 0.50" in growth.primary(table.assign(r2_power=0.5))[0].reason
    assert said(wrong.assign(r2_power=0.5))["R1"] == "contradicted"
    # where trained pre-LN models are judged, neither post-LN nor initialisations matter, and the other way round
    ours = (table["source"] == "trained") & (table["arm"] == "pre")
    assert said(pd.concat([table[ours], wrong[~ours]])) == {
        "R1": "supported",
        "R2": "supported",
        "M1": "supported",
        "D2": "contradicted",
    }
    one = table[~(ours & (table["seed"] == 2))]
    assert {claim: word for claim, word in said(one).items() if word == "cannot be judged here"}.keys() == {
        "R1",
        "R2",
        "M1",
    }
    failed = table[ours & (table["seed"] == 2)].iloc[:1].assign(unit="failed")
    tests = growth.primary(pd.concat([one, failed]))
    assert [test.reason for test in tests[:3]] == ["training failed with 1 of 2 seeds"] * 3


# merge_twins.py


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_costs_of_merges(placement: str) -> None:
    model = model_of(placement, 2)
    table = twins.rho_rows(model)
    _, corpus, anatomy = models.opened(model, 128)
    wanted = [way for way in twins.WAYS.values() if placement == "post" or "branch-sum" not in way]
    assert {*table["change"]} == {*wanted, *twins.CONTROLS}
    assert set(table["change"].value_counts()[wanted]) == {BLOCKS - 1}
    with torch.no_grad():
        for change, run in (
            ("sum", added),
            ("mean", averaged),
            ("attention first, sum", attention_first),
            ("skip", None),
        ):
            for layer in range(BLOCKS - 1):
                rows = study.arm(table, change=change, layer=layer)
                assert rows["kl"].item() == pytest.approx(kl(model, corpus.inputs, layer, run), rel=1e-3)
    found = sweep(anatomy, corpus, twins.changes(anatomy), SweepSettings())
    theirs = merge_against_skip(found, Resampler(corpus.sequences))
    keyed = table.assign(arm=placement, name="x", blocks=BLOCKS, seed=1, at="end")
    logs = twins.log_rho(keyed, placement, "sum")
    np.testing.assert_allclose(np.exp(logs[1]), [row["value"] for row in theirs["layers"]])
    assert twins.slopes(logs) == (pytest.approx(theirs["slope"]["value"]),)


def added(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
    return first(x) + second(x) - x


def averaged(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
    return (first(x) + second(x)) / 2


def attention_first(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
    """(a + a)(m + m), each sublayer with its own norm."""
    for unit in ("attention", "mlp"):
        steps = []
        for block in (first, second):
            skip = block.attention_skip if unit == "attention" else block.mlp_skip
            given = skip.read(x)
            steps.append(
                skip.add(x, block.attention(given, None, None)[0] if unit == "attention" else block.mlp(given)) - x
            )
        x = x + steps[0] + steps[1]
    return x


def kl(model: nn.Module, ids: Tensor, layer: int, run: object) -> float:
    """KL(unchanged ‖ changed) with two blocks run by `run`, or block `layer` left out."""
    inner = model.model

    def logits(changed: bool) -> Tensor:
        x = inner.token_embedding(ids) + inner.position_embedding.weight[: ids.shape[1]]
        place = 0
        while place < BLOCKS:
            if changed and place == layer:
                x = run(inner.blocks[place], inner.blocks[place + 1], x) if run else x
                place += 2 if run else 1
            else:
                x = inner.blocks[place](x)
                place += 1
        x = x if inner.final_norm is None else inner.final_norm(x)
        return log_softmax(model.lm_head(x)[:, :-1].double(), dim=-1)

    p, q = logits(False), logits(True)
    return float((p.exp() * (p - q)).sum(dim=-1).mean())


def rho_table(pre: float = -1.0, post: float = 0.2, seeds: int = 2) -> pd.DataFrame:
    """log ρ of `sum` falls by `pre` and `post` over the depth; the other ways cost twice and half as much in post."""
    rng, lines = np.random.default_rng(0), []
    for arm, seed, at in itertools.product(("pre", "post"), range(1, seeds + 1), ("end", "loss")):
        slope = pre if arm == "pre" else post
        for layer in range(12):
            skip = math.exp(rng.normal(0, 1))
            lines.append((arm, "x", 12, seed, at, "", "skip", "block", layer, skip))
            if layer == 11:
                continue
            rho = math.exp(slope * layer / 10 + rng.normal(0, 1e-3))
            half = {"pre": 2.0, "post": 0.5}[arm] * math.exp(0.3 * layer / 10)  # and its slope is another one
            costs = {"sum": rho, "mean": 2 * rho, "attention first, sum": half * rho, "averaged weights": rho / 9}
            costs |= dict.fromkeys(twins.CONTROLS[1:], 3 * rho)
            lines += [(arm, "x", 12, seed, at, "", name, "block", layer, skip * cost) for name, cost in costs.items()]
    return pd.DataFrame([(*line, 0.1, 0.9) for line in lines], columns=twins.RHO_COLUMNS)


def test_slopes_and_verdicts_of_merges_with_known_answers(tmp_path: Path) -> None:
    table = rho_table()
    assert (twins.cheapest(table, "pre"), twins.cheapest(table, "post")) == ("sum", "attention first, sum")
    first, second = twins.rho_primary(table)
    assert first.values == (pytest.approx(-1.0, abs=0.01),) * 2
    assert second.values == (pytest.approx(-1.5, abs=0.01),) * 2  # −1 against 0.2 + 0.3
    assert [word for *_, word in study.adjusted([first, second])] == ["supported"] * 2
    rising = twins.rho_primary(rho_table(pre=0.5, post=-0.5))
    assert [word for *_, word in study.adjusted(rising)] == ["contradicted"] * 2
    alike = twins.rho_primary(rho_table(pre=-0.5, post=-0.8))
    assert [word for *_, word in study.adjusted(alike)] == ["supported", "contradicted"]
    text = told(twins, table, tmp_path)
    assert text.count("| M2 | **supported**") == 2
    assert "in pre-LN, sum (seeds 1, 2); in post-LN, attention first, sum (seeds 1, 2)." in text
    assert re.search(r"Pre over post at equal loss, .*first 0\.22\d \[.*\] \(changed, smallest effect × 1", text)
    assert "compared at their own learning rates" in text
    failed = table.assign(unit=np.where((table["arm"] == "post") & (table["seed"] == 2), "failed", table["unit"]))
    assert [type(test).__name__ for test in twins.rho_primary(failed)] == ["Primary", "Unjudged"]
    assert [type(test).__name__ for test in twins.rho_primary(table[table["seed"] == 1])] == ["Unjudged"] * 2


def test_no_seed_has_a_part_in_the_choice_that_it_is_judged_by() -> None:
    """Seed 1 alone makes `sum` the cheapest: seeds 2 and 3 are merged so, and seed 1 in the way of these two."""
    table = rho_table(seeds=3)
    cheap = (table["arm"] == "post") & (table["seed"] == 1) & (table["change"] == "sum")
    table.loc[cheap, "kl"] *= 1e-3
    assert twins.cheapest(table, "post") == "sum"
    assert twins.by_others(table, "post") == {1: "attention first, sum", 2: "sum", 3: "sum"}
    assert twins.difference(table) == pytest.approx([-1.5, -1.2, -1.2], abs=0.01)
    assert "in post-LN, attention first, sum (seed 1) and sum (seeds 2, 3)." in twins.choices(table)
    assert twins.by_others(table[table["seed"] == 1], "post") == {}


def test_merges_of_pre_at_the_setting_of_post_beside_the_end_of_post(tmp_path: Path) -> None:
    table = rho_table()
    matched = rho_table(pre=-2.0).query("arm == 'pre' and at == 'end'").assign(at="matched", name="y")
    both = pd.concat([table, matched])
    assert twins.rho_primary(both) == twins.rho_primary(table)
    assert twins.difference(both, "matched") == pytest.approx([-2.5] * 2, abs=0.01)  # −2 against 0.2 + 0.3
    text = told(twins, both, tmp_path)
    found = re.search(r"Pre over post at equal tokens, both with post-LN's setting, .*first (\S+) \[", text)
    assert float(found[1]) == pytest.approx(math.exp(-2.5), rel=0.01)
    assert text.count("\n| equal tokens, both with post-LN's setting | pre |") == 4 + len(twins.CONTROLS) - 1
    assert "compared at their own learning rates" not in text


def test_a_skip_that_costs_nothing_has_no_ratio() -> None:
    table = rho_table()
    table.loc[(table["change"] == "skip") & (table["layer"] == 4), "kl"] = 1e-9
    assert twins.log_rho(table, "pre", "sum").isna().sum().sum() == 2
    assert twins.rho_primary(table)[0].values == (pytest.approx(-1.0, abs=0.01),) * 2


# From the command line


@pytest.mark.parametrize("module", [growth, twins], ids=["growth", "merge_twins"])
def test_what_comes_later_leaves_the_table_of_a_fresh_run(
    trained_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], module: ModuleType
) -> None:
    pd.read_csv(trained_runs / "runs.csv").query("seed == 1").to_csv(tmp_path / "some.csv", index=False)
    work, table = trained_runs / "work", tmp_path / ("growth.csv" if module is growth else twins.RHO)
    line = ["--work", str(work), "--results", str(tmp_path / f"{module.NAME}.csv")]
    line += ["--weights", str(work), "--blocks", str(BLOCKS)] if module is growth else ["--merges"]
    assert module.main([*line, "--runs", str(tmp_path / "some.csv")]) == OutputError.exit_code
    assert "for pre 2, post 2; expected" in capsys.readouterr().err
    with pytest.raises(OutputError, match="has 1 of 2 trained pre models"):
        module.section(tmp_path, blocks=BLOCKS)
    assert module.main([*line, "--runs", str(trained_runs / "runs.csv")]) == 0
    assert "compared at their own learning rates" in capsys.readouterr().out
    before = table.read_text()
    assert module.main([*line, "--runs", str(trained_runs / "swapped.csv")]) == 0  # pre-LN at post-LN's setting comes
    assert table.read_text().startswith(before)
    said = capsys.readouterr().out
    assert "compared at their own learning rates" not in said
    section = module.section(tmp_path, blocks=BLOCKS)
    assert section.text(study.adjusted(section.tests)) in said
    assert ("| D2 | **" if module is growth else "| M2 | **") in said
    found = trained(trained_runs, "swapped.csv")
    fresh = (growth.COLUMNS, growth.plan(found), growth.Measure(found, work))
    fresh = fresh if module is growth else (twins.RHO_COLUMNS, found.jobs(), twins.RhoRows(found))
    study.collect(tmp_path / "fresh.csv", *fresh)
    assert table.read_bytes() == (tmp_path / "fresh.csv").read_bytes()


def test_too_few_blocks_and_two_models_of_one_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert growth.main(["--blocks", "2"]) == UsageError.exit_code
    assert "have thirds" in capsys.readouterr().err
    with pytest.raises(OutputError, match=r"the weights of small; python scripts/fetch"):
        growth.public(tmp_path, "small")
    both = pd.concat([rho_table(), rho_table().assign(name="y")])
    both.to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(OutputError, match="x and y as post 1 end; expected one model"):
        twins.rho_table(tmp_path / "t.csv", 12)
