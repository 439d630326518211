"""The training studies: runs come again, arms are matched, losses are of what they say, verdicts follow the rules."""

from __future__ import annotations

import importlib
import json
import math
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from depthprobe.contrast import over_seeds, smallest_effect
from depthprobe.errors import CheckpointError, OutputError

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "data" / "results"
SCORED = 1024
TABLES = ("warmup", "branch_norm", "pre_vs_post", "merge_twins", "variants", "oscillation")


def script(name: str) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "analyses"))
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def runs() -> ModuleType:
    return script("runs")


@pytest.fixture(scope="module")
def study() -> ModuleType:
    return script("study")


def small(runs: ModuleType, arm: str = "pre", **other: object) -> object:
    values = {"stage": "confirm", "arm": arm, "blocks": 2, "width": 16, "optimizer": "adamw", "lr": 1e-3, "warmup": 1,
              "steps": 3, "seed": 1}  # fmt: skip
    return runs.Run(**values | other)


@pytest.fixture(scope="module", autouse=True)
def _few_sequences(runs: ModuleType) -> object:
    """Losses of a handful of sequences, and a thread: these are no measurements."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "SCORED", 32)
        runs.halves.cache_clear()
        yield
    runs.halves.cache_clear()
    torch.set_num_threads(threads)


# Runs


def test_a_run_comes_again_to_the_digit(runs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [small(runs, seed=seed) for seed in (1, 2)]
    tables = []
    monkeypatch.setattr(runs, "SCORED", SCORED)  # as many as the workers take
    runs.halves.cache_clear()
    monkeypatch.syspath_prepend(str(ROOT / "analyses"))  # which workers take over, as they do from a script
    for folder, workers in ((tmp_path / "a", 1), (tmp_path / "b", 2)):
        options = type("Options", (), {"work": folder / "work", "workers": workers})
        tables.append(runs.collect(folder / "t.csv", jobs, options, "Trying"))
    pd.testing.assert_frame_equal(*tables)
    assert tables[0]["dev"].nunique() == 2
    assert runs.runs_of(tables[0]) == jobs
    (tmp_path / "a" / "work" / jobs[0].name / "config.json").unlink()
    with pytest.raises(CheckpointError):
        runs.model_of(jobs[0], tmp_path / "a" / "work")
    runs.halves.cache_clear()


def test_checkpoints_that_are_gone_are_made_again(runs: ModuleType, tmp_path: Path) -> None:
    job = small(runs)
    first = runs.model_of(job, runs.ensure(job, tmp_path / "a").parent)
    again = runs.model_of(job, runs.ensure(job, tmp_path / "b").parent)
    assert all(torch.equal(x, y) for x, y in zip(first.parameters(), again.parameters(), strict=True))
    assert {path.name for path in (tmp_path / "a" / job.name).glob("step-*")} == {f"step-{k}" for k in range(3)}
    grid = small(runs, stage="grid", seed=0)
    assert list((runs.ensure(grid, tmp_path / "a")).glob("step-*")) == []


def test_losses_are_of_the_two_halves_and_of_no_training_text(runs: ModuleType, tmp_path: Path) -> None:
    job = small(runs)
    row = dict(
        zip(runs.OUTCOMES, runs.outcome(tmp_path, *(getattr(job, name) for name in runs.COLUMNS[:9]))[0], strict=True)
    )
    model = runs.model_of(job, tmp_path)
    for half in ("dev", "test"):
        ids, _ = runs.halves()[half]
        with torch.no_grad():
            logits = model(input_ids=ids).logits[:, :-1]
        plain = F.cross_entropy(logits.double().flatten(0, 1), ids[:, 1:].flatten())
        assert row[half] == pytest.approx(float(plain), rel=1e-6)
    assert row["tokens"] == 3 * 16 * 64
    dev, test = (runs.halves()[half][0].numpy().astype(np.uint16).tobytes() for half in ("dev", "test"))
    stream = runs.text().stream.astype(np.uint16).tobytes()
    for part in (dev[:256], dev[-256:], test[:128], test[-128:]):
        assert part[:128] not in stream
    assert dev != test
    counts = np.bincount(runs.text().stream, minlength=runs.text().vocab_size) + 1
    asked = runs.halves()["dev"][0][:, 1:].numpy()
    assert runs.unigram() == pytest.approx(-np.log(counts / counts.sum())[asked].mean())


def test_sgd_is_run_without_decay_where_it_is_asked_for(runs: ModuleType, tmp_path: Path) -> None:
    decays = {}
    for optimizer in ("sgd", runs.SGD_PLAIN):
        home = runs.ensure(small(runs, optimizer=optimizer, lr=0.1), tmp_path)
        settings = json.loads((home / "run.json").read_text())["settings"]
        assert settings["optimizer"] == "sgd"
        decays[optimizer] = settings["weight_decay"]
    assert decays == {"sgd": 0.1, runs.SGD_PLAIN: 0.0}


def test_a_run_that_learns_nothing_has_failed(runs: ModuleType, tmp_path: Path) -> None:
    values = [getattr(small(runs), name) for name in runs.COLUMNS[:9]]
    assert runs.outcome(tmp_path, *values)[0][0] == "failed"  # three steps are not enough
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "FAILED", 10.0)
        assert runs.outcome(tmp_path, *values)[0][0] == "done"


def test_the_baseline_has_no_blocks(runs: ModuleType, tmp_path: Path) -> None:
    """Its logits are those of embeddings, final norm and head, before and after training."""
    job = small(runs, "embedding", blocks=1)
    runs.ensure(job, tmp_path)
    before, after = runs.model_of(job, tmp_path, 0), runs.model_of(job, tmp_path)
    ids = torch.randint(0, 200, (2, 64), generator=torch.Generator().manual_seed(0))
    for model in (before, after):
        x = model.model.token_embedding(ids) + model.model.position_embedding.weight[:64]
        torch.testing.assert_close(model(input_ids=ids).logits, model.lm_head(model.model.final_norm(x)))
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight)


def test_equal_gradients(runs: ModuleType, tmp_path: Path) -> None:
    model = runs.model_of(small(runs), runs.ensure(small(runs), tmp_path).parent).train()
    ids = torch.randint(0, 200, (2, 64), generator=torch.Generator().manual_seed(0))
    model(input_ids=ids, labels=ids).loss.backward()

    def sizes() -> list[float]:
        return [float(sum(w.grad.square().sum() for w in block.parameters())) for block in model.model.blocks]

    before = sizes()
    directions = [w.grad / w.grad.norm() for w in model.model.blocks[0].parameters()]
    runs.equalise(model)
    assert sizes() == pytest.approx([sum(before) / 2] * 2, rel=1e-4)
    for weight, direction in zip(model.model.blocks[0].parameters(), directions, strict=True):
        torch.testing.assert_close(weight.grad / weight.grad.norm(), direction)
    plain, scaled = (runs.ensure(small(runs, arm, lr=0.1), tmp_path) for arm in ("post", "post-equal"))
    one, other = (runs.load(home, device="cpu", dtype="float32").model for home in (plain, scaled))
    assert any(not torch.equal(x, y) for x, y in zip(one.parameters(), other.parameters(), strict=True))


def test_other_sizes_have_tables_of_their_own(runs: ModuleType) -> None:
    """--full and --steps must not write among the rows that the findings are made of."""
    seen = []
    for given in ([], ["--full"], ["--steps", "5"], ["--full", "--results", "x.csv"]):
        assert runs.started(runs.arguments("warmup", ""), lambda options: seen.append(options.results), given) == 0
    assert [str(path) for path in seen] == [
        "data/results/warmup.csv", "data/results/full/warmup.csv", "reports/tried/warmup.csv", "x.csv",
    ]  # fmt: skip


# Matched arms


@pytest.mark.parametrize("name", TABLES)
def test_arms_are_matched(runs: ModuleType, study: ModuleType, name: str) -> None:
    """Every arm of a table has the same grid, the same tokens and seeds, and parameters that differ by the norms."""
    path = RESULTS / f"{name}.csv"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    table = runs.load_table(path)
    grid = study.arm(table, stage="grid")
    of = ["arm", "blocks", "optimizer"]
    points = {
        key: {tuple(row) for row in rows[["lr", "warmup", "steps", "seed"]].itertuples(index=False)}
        for key, rows in grid.groupby(of)
    }
    for key, mine in points.items():
        for other, theirs in points.items():
            if key[1:] == other[1:]:
                assert mine == theirs, (key, other)
    whole = table[~table["reason"].str.startswith("diverged")]
    assert (whole["tokens"] == whole["steps"] * runs.BATCH * runs.TOKENS).all()
    counts = table[table["arm"] != "embedding"].groupby(["blocks", "width"])["parameters"]
    assert (counts.max() / counts.min() < 1.01).all()
    for (_, stage, blocks, optimizer), rows in table[table["stage"] != "grid"].groupby(
        ["arm", "stage", "blocks", "optimizer"]
    ):
        assert rows.groupby(["lr", "warmup"])["seed"].nunique().nunique() == 1, (stage, blocks, optimizer)
    assert not table.duplicated(list(runs.COLUMNS[:9])).any()


def test_the_order_of_the_data_is_by_seed_alone(runs: ModuleType) -> None:
    assert torch.equal(runs.text().batch(3, 7, 16)[0], runs.text().batch(3, 7, 16)[0])
    assert not torch.equal(runs.text().batch(3, 7, 16)[0], runs.text().batch(4, 7, 16)[0])


def test_what_is_chosen_is_confirmed(runs: ModuleType, study: ModuleType) -> None:
    """In every committed table, confirmation runs of an arm have a setting of its grid's best, by dev."""
    path = RESULTS / "pre_vs_post.csv"
    table = runs.load_table(path)
    judged = study.arm(table, stage="confirm")
    judged = judged[judged["arm"] != "embedding"]
    for (arm, blocks), rows in judged.groupby(["arm", "blocks"]):
        best = runs.best(table, arm=arm, blocks=blocks)
        assert {(row.lr, row.warmup) for row in rows.itertuples()} == {(best["lr"], best["warmup"])}
        assert set(rows["seed"]) & {0} == set()


# Rules


def made_up(runs: ModuleType, rows: list[dict[str, object]]) -> pd.DataFrame:
    plain = {
        "stage": "confirm", "arm": "pre", "blocks": 12, "width": 64, "optimizer": "adamw", "lr": 1e-3, "warmup": 50,
        "steps": 600, "seed": 1, "status": "done", "dev": 2.0, "test": 2.0, "unigram": 3.1, "parameters": 9,
        "tokens": 614400, "reason": "",
    }  # fmt: skip
    return pd.DataFrame([plain | row for row in rows], columns=runs.COLUMNS)


def seeds_of(arm: str, losses: list[float], **other: object) -> list[dict[str, object]]:
    return [{"arm": arm, "seed": seed, "test": loss} | other for seed, loss in enumerate(losses, 1)]


def test_the_lowest_of_a_grid(runs: ModuleType) -> None:
    rows = [{"lr": 1.0, "dev": 2.5}, {"lr": 2.0, "dev": 2.1}, {"lr": 3.0, "dev": 1.0, "status": "failed"}]
    assert runs.lowest(made_up(runs, rows))["lr"] == 2.0
    assert runs.lowest(made_up(runs, [row | {"status": "failed"} for row in rows]))["lr"] == 3.0
    assert runs.lowest(made_up(runs, [{"lr": 4.0, "dev": math.nan, "status": "failed"}]))["lr"] == 4.0
    with pytest.raises(OutputError):
        runs.lowest(made_up(runs, []))


def test_a_difference_by_seed_a_margin_and_failures(runs: ModuleType, study: ModuleType) -> None:
    base = seeds_of("embedding", [2.5] * 5)
    table = made_up(
        runs, [*base, *seeds_of("pre", [1.5, 1.6, 1.7, 1.8, 1.9]), *seeds_of("post", [1.6, 1.71, 1.79, 1.9, 2.0])]
    )
    pre, post = (study.arm(table, arm=arm) for arm in ("pre", "post"))
    margin = runs.margin(table, pre)
    assert margin == pytest.approx(0.08)
    test = runs.compared("P1", "post − pre", post.sample(frac=1, random_state=0), pre, margin, "above")
    assert test.sentence == "post − pre, nats; predicted above 0.080"
    np.testing.assert_allclose(test.values, [0.1, 0.11, 0.09, 0.1, 0.1])
    assert study.verdict(test, study.probability(test)) == "supported"
    assert study.verdict(runs.compared("P1", "", pre, post, margin, "above"), 1.0) == "contradicted"
    bad = post.assign(status=["failed", *["done"] * 4])
    assert isinstance(runs.compared("P1", "", bad, pre, margin, "above"), study.Unjudged)
    counted = runs.compared("W1", "", bad, pre, margin, "above", fails=True)
    assert (counted.failed, counted.spared, counted.seeds) == (1, 0, 5)
    for arm, other in ((pre, bad), (bad, bad)):  # what is predicted to fail did not, or no more than the other
        assert isinstance(runs.compared("W1", "", arm, other, margin, "above", fails=True), study.Unjudged)
    some = [rows[rows["seed"] < 4] for rows in (post, pre)]
    for arm, other in ((some[0], pre), some):  # a study that was stopped has the same seeds of both
        test = runs.compared("P1", "", arm, other, margin, "above")
        assert isinstance(test, study.Unjudged) and "missing" in test.reason  # noqa: PT018
    assert [runs.predicted(0.05, where) for where in ("above", "below", "within")] == [
        ("above 0.050", (0.05, math.inf)), ("below −0.050", (-math.inf, -0.05)), ("within ± 0.050", (-0.05, 0.05)),
    ]  # fmt: skip


@pytest.mark.parametrize("where", ["above", "below", "within"])
def test_a_reference_no_better_than_no_blocks_gives_no_margin(runs: ModuleType, study: ModuleType, where: str) -> None:
    table = made_up(runs, [*seeds_of("embedding", [2.5] * 5), *seeds_of("post", [2.6, 2.7, 2.65, 2.7, 2.6])])
    post = study.arm(table, arm="post")
    margin = runs.margin(table, post)
    assert margin == pytest.approx(-0.015)
    test = runs.compared("W1", "without − with", post.assign(test=post["test"] + 0.001), post, margin, where)
    assert isinstance(test, study.Unjudged)
    assert "no margin" in test.reason and "the margin" in test.sentence  # noqa: PT018
    assert isinstance(runs.compared("W1", "", post, post, math.nan, where), study.Unjudged)


def test_words_of_tests_that_are_no_means(study: ModuleType) -> None:
    every = study.Counted("W1", "", 5, 0, 5)
    assert study.probability(every) == pytest.approx(2 / math.comb(10, 5))
    assert study.verdict(every, study.probability(every)) == "supported"
    assert study.verdict(study.Counted("W1", "", 3, 0, 5), 0.17) == "undecided"
    assert study.verdict(study.Counted("W1", "", 0, 0, 5), 1.0) == "contradicted"
    assert study.probability(study.Counted("W1", "", 0, 5, 5)) == 1.0
    words = "4 failures against 0; 5 against 0 give p = 0.00794 before Holm"
    assert study.least_effect(every) == words  # 2 · 5 / 210, 2 / 252
    against = study.Primary("G4", "", (0.01, 0.0, -0.01, 0.02, 0.0), -0.4, 0.4, against=True)
    assert study.verdict(against, study.probability(against)) == "contradicted"
    assert study.verdict(against, 0.2) == "undecided"
    ruled = study.Ruled("N1", "", "supported", "none differs", 5)
    found = study.adjusted([ruled, every, study.Unjudged("D3", "", "too small")])
    assert [word for *_, word in found] == ["supported", "supported", study.UNJUDGED]
    assert found[1][1] == pytest.approx(2 * 2 / math.comb(10, 5))  # of two tests: the rule is none
    found = study.adjusted([ruled, every, study.Unjudged("D3", "", "too small", primary=False)])
    assert [word for *_, word in found] == ["supported", "supported", study.UNJUDGED]
    assert found[1][1] == pytest.approx(2 / math.comb(10, 5))  # what was said to be no test is not corrected for
    assert study.of_claim(["supported", study.UNJUDGED]) == study.UNJUDGED
    assert study.of_claim(["undecided", "contradicted", study.UNJUDGED]) == "contradicted"


def test_parallel_pairs_on_a_table_with_a_known_answer(runs: ModuleType, study: ModuleType) -> None:
    pairs = script("parallel_pairs")
    spread = np.array([0.0, 0.01, -0.01, 0.02, -0.02])
    beside, table = [], []
    for arm in ("pre", "post"):
        for blocks, loss in ((12, 1.5), (6, 1.9)):
            setting = {"blocks": blocks, "warmup": 500, "steps": 2000, "lr": 3e-3}
            beside += [{"arm": arm, "stage": "grid", "seed": 0} | setting | {"lr": lr, "dev": 2 + abs(lr - 3e-3)}
                       for lr in (1e-4, *pairs.RATES)]  # fmt: skip
            beside += seeds_of(arm, list(loss + spread), **setting)
    for arm, part in (("pre-parallel", 0.04), ("post-parallel", 0.8), ("post-parallel-norms", 0.5)):
        table += seeds_of(arm, list(1.5 + 0.4 * part + spread * 1.01), warmup=500, steps=2000)
    beside, table = made_up(runs, beside), made_up(runs, table)
    pre, post = pairs.primary(table, beside)
    assert np.mean(pre.values) == pytest.approx(0.04)
    assert np.mean(post.values) == pytest.approx(0.8)
    assert [word for *_, word in study.adjusted([pre, post])] == ["supported", "supported"]
    worse = beside.assign(test=np.where(beside["blocks"] == 6, 1.49, beside["test"]))
    assert all(isinstance(test, study.Unjudged) for test in pairs.primary(table, worse))
    once = beside.assign(test=np.where((beside["blocks"] == 6) & (beside["seed"] == 2), 1.5, beside["test"]))
    assert over_seeds(once[once["blocks"] == 6].query("arm == 'pre' and stage == 'confirm'")["test"]).low > 1.55
    assert all(isinstance(test, study.Unjudged) for test in pairs.primary(table, once))  # a ratio with a gap below 0
    assert "half minus sequential −0.01" in pairs.primary(table, worse)[0].reason
    assert "pre-LN, at learning rates of 0.001 against 0.003, 0.016" in pairs.note(table, beside)
    lost = table.assign(status=np.where(table["arm"] == "pre-parallel", "failed", table["status"]))
    assert "pre-LN, at" not in pairs.note(lost, beside)
    assert "post-LN, one norm" in pairs.note(lost, beside)
    assert pairs.sequential(beside, "pre", 12)["lr"] == 3e-3
    with pytest.raises(OutputError, match="3 of 4 runs of the grid of pre"):
        pairs.sequential(beside[beside["lr"] != 1e-2], "pre", 12)


def test_depth_of_models_that_learned_alone(runs: ModuleType, study: ModuleType, tmp_path: Path) -> None:
    tables(runs, tmp_path)
    pre_vs_post = script("pre_vs_post")
    trained_depth = script("trained_depth")
    table, deep = runs.load_table(tmp_path / "pre_vs_post.csv"), study.read(tmp_path / f"{trained_depth.NAME}.csv")
    lost = (table["arm"] == "post") & (table["stage"] == "confirm") & table["seed"].isin([1, 2, 3])
    table.assign(status=np.where(lost, "failed", table["status"])).to_csv(tmp_path / "pre_vs_post.csv", index=False)
    section = pre_vs_post.section(tmp_path)
    said = section.text(study.adjusted(section.tests))
    assert "Left out, since they failed: 3 of post with 6 blocks; 3 of post with 12 blocks." in said
    assert "over 7 models" in said  # the correlation of D4
    judged = next(test for test in section.tests if test.claim == "D1")
    assert "2 of 2 seeds" in judged.reason  # all pass in the made-up table, and three are needed
    assert "6 blocks: failed 0 of 5 of pre-LN, 3 of 5 of post-LN" in said
    alone = deep[(deep["arm"] == "pre") | (deep["seed"] > 3)]  # what one arm lacks is in neither
    assert "of 2 seeds" in trained_depth.of_depth(alone, 12).reason


def test_sgd_models_that_are_better_than_none(runs: ModuleType, tmp_path: Path) -> None:
    tables(runs, tmp_path)
    warmup = script("warmup")
    table = runs.load_table(tmp_path / "warmup.csv")
    base = table.loc[table["arm"] == "embedding", "test"].mean()
    mine = (table["optimizer"] == runs.SGD_PLAIN) & (table["stage"] == "confirm")
    for side, count in ((-0.1, 10), (0.1, 0)):
        other = table.assign(test=np.where(mine, base + side, table["test"]), status="done")
        assert f"without {count} of 10 of post-LN, {count} of 10 of pre-LN" in warmup.of_sgd(other)
    cold = mine & (table["arm"] == "post") & (table["warmup"] == 0)
    lost = other.assign(test=np.where(mine, base - 0.1, table["test"]), status=np.where(cold, "failed", "done"))
    assert "without 5 of 10 of post-LN (5 of them failed), 10 of 10 of pre-LN" in warmup.of_sgd(lost)
    assert "without not run yet" in warmup.of_sgd(table[table["optimizer"] != runs.SGD_PLAIN])


def test_what_failed_runs_of_sgd_say(runs: ModuleType, study: ModuleType, tmp_path: Path) -> None:
    tables(runs, tmp_path)
    warmup = script("warmup")
    table = runs.load_table(tmp_path / "warmup.csv").assign(status="done")
    assert warmup.failing(table) == ""
    mine = (table["optimizer"] == runs.SGD_PLAIN) & (table["arm"] == "post")
    cold, lowest = mine & (table["warmup"] == 0), min(warmup.RATES[runs.SGD_PLAIN])
    table.loc[mine & (table["stage"] == "confirm") & ~cold, "lr"] = lowest
    table.loc[mine & (table["stage"] == "confirm") & cold, "lr"] = 1.0
    lost = table.assign(status=np.where(cold | (mine & (table["lr"] == 1.0)), "failed", "done"))
    said = warmup.failing(lost)
    assert "fails without warm-up at 5 of the 5 learning rates tried, 0.03 to 3 (seed 0)" in said
    assert "are at 1, the best of these, where it fails with 50 and 200 steps of warm-up too" in said
    assert "those with warm-up are at 0.03, where it trains with 50 steps and 200 steps (seed 0)" in said
    assert "Below 0.03 nothing was tried" in said
    assert "5 failures against 0 are the most that 5 seeds can show" in said
    cell = runs.summary(lost[cold & (lost["stage"] == "grid")], lost[cold & (lost["stage"] == "confirm")])
    assert cell[3] == "all failed"
    higher = lost.assign(lr=np.where(mine & ~cold & (lost["stage"] == "confirm"), 0.1, lost["lr"]))
    assert "nothing was tried" not in warmup.failing(higher)


def test_which_placement_contradicts_the_need_of_warm_up(
    runs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables(runs, tmp_path)
    warmup, table = script("warmup"), runs.load_table(tmp_path / "warmup.csv").assign(status="done")
    words: dict[str, list[str]] = {}
    taken = {arm: iter(()) for arm in warmup.PLACEMENTS}

    def verdict(test: object, _: float) -> str:
        arm = "post" if ", post:" in test.sentence else "pre"  # type: ignore[attr-defined]
        return next(taken[arm])

    monkeypatch.setattr(warmup.study, "verdict", verdict)

    def said(post: list[str], pre: list[str], rows: pd.DataFrame = table) -> str:
        words.update(post=post, pre=pre)
        taken.update({arm: iter(found) for arm, found in words.items()})
        return warmup.by_whom(rows)

    cannot = "cannot be judged here"
    found = said([cannot, cannot, "undecided"], ["contradicted", "undecided", "contradicted"])
    assert "pre-LN alone" in found
    assert "of its 3 tests 2 could not be made" in found
    assert "fails nowhere for want of it." in found
    assert said([cannot, "contradicted", "undecided"], ["contradicted"] * 3) == ""
    assert said([cannot] * 3, ["undecided"] * 3) == ""
    high = (table["optimizer"] == runs.SGD_PLAIN) & (table["arm"] == "pre") & (table["lr"] == 3)
    both = table.assign(status=np.where(high, "failed", "done"))
    assert "no decay, at 3, with warm-up and without" in said([cannot] * 3, ["contradicted"] * 3, both)
    cold = table.assign(status=np.where(high & (table["warmup"] == 0), "failed", "done"))
    assert "for want of it" not in said([cannot] * 3, ["contradicted"] * 3, cold)


def test_correlation_without_what_the_placement_alone_makes(runs: ModuleType) -> None:
    """Within each arm the ranks go against each other, between the arms together."""
    study = script("trained_depth")
    rows = pd.DataFrame({"arm": ["pre"] * 3 + ["post"] * 3, "value": [1, 2, 3, 11, 12, 13], "test": [3, 2, 1, 9, 8, 7]})
    assert rows["value"].corr(rows["test"], method="spearman") > 0.5
    assert study.partial_spearman(rows) == pytest.approx(-1.0)


def test_cells_of_confirmed_runs(runs: ModuleType, study: ModuleType) -> None:
    """Losses of runs that failed take no part; what is missing is a dash."""
    losses = [1.5, 1.6, 1.7, 1.8, 9.0]
    rows = made_up(runs, seeds_of("pre", losses)).assign(status=["done"] * 4 + ["failed"])
    tried = made_up(runs, [{"lr": lr, "status": word} for lr, word in ((1e-4, "failed"), (1e-3, "done"))])
    cells = dict(zip(runs.SUMMARY, runs.summary(tried, rows), strict=True))
    assert cells["loss on test, nats"] == study.span(over_seeds(losses[:4]))
    assert float(cells["smallest effect"]) == pytest.approx(smallest_effect(4) * np.std(losses[:4], ddof=1), abs=5e-4)
    assert (cells["failed"], cells["seeds"], cells["failed in the grid"]) == ("1 of 5", "5", "1 of 2")
    assert cells["where in the grid"] == "edge: rate"
    gone = rows.assign(status="failed")
    assert runs.summary(tried, gone)[4:] == ["–", "–", "5 of 5", "5", "9"]
    part, whole = tried.assign(warmup=50), pd.concat([tried.assign(warmup=each) for each in (0, 50)])
    for grid, said in ((None, "edge: rate"), (whole, "edge: rate and warm-up")):
        assert runs.summary(part, rows, grid)[3] == said
    assert len(runs.summary(tried, rows[:0])) == len(runs.SUMMARY)


# What studies say of whole tables


def trained(runs: ModuleType, jobs: list[object]) -> pd.DataFrame:
    """Runs as if they had been made: a loss by arm, blocks and learning rate, and post-LN at high rates failed."""
    rng, rows = np.random.default_rng(0), []
    for job in jobs:
        values = {name: getattr(job, name) for name in runs.COLUMNS[:9]}
        bad = values["arm"].startswith("post") and values["warmup"] == 0 and values["lr"] > 1e-3
        loss = 1.5 + 0.1 * abs(math.log(values["lr"] / 2e-3)) + rng.normal(0, 0.01)
        loss += {"embedding": 1.0, "post": 0.1}.get(values["arm"], 0.0) + 0.3 * (values["blocks"] == 6)
        bad_words = {"status": "failed", "dev": 3.2, "test": 3.2, "reason": "no better than"}
        rows.append(values | ({"dev": loss, "test": loss} if not bad else bad_words))
    return made_up(runs, rows)


def tables(runs: ModuleType, home: Path) -> None:
    """The tables of all studies that train, from their own plans."""
    warmup, branch, pre_vs_post, variants = (
        script(name) for name in ("warmup", "branch_norm", "pre_vs_post", "variants")
    )
    pairs, oscillation, trained_depth = (script(name) for name in ("parallel_pairs", "oscillation", "trained_depth"))
    rng = np.random.default_rng(1)

    def kept(name: str, jobs: list[object]) -> pd.DataFrame:
        table = trained(runs, jobs)
        table.to_csv(home / f"{name}.csv", index=False)
        return table

    jobs = warmup.grid(warmup.SIZE)
    jobs += warmup.confirmations(trained(runs, jobs))
    later = warmup.grid(warmup.SIZE, optimizers=warmup.LATER)
    beside = kept("warmup", [*jobs, *later, *warmup.confirmations(trained(runs, later), warmup.LATER)])
    jobs = warmup.grid(warmup.SIZE, branch.ARMS, ("adamw",), branch.WARMUPS)
    kept("branch_norm", [*jobs, *branch.confirmations(trained(runs, jobs))])
    states = [
        (arm, when, seed, block, 60 + 100 * block + rng.normal(), 60 + 128 * block,
         5 + rng.normal() if block < 12 else math.nan, 0.8 + 0.1 * rng.random() if block < 12 else math.nan,
         math.nan if block < 12 else 1.0)
        for arm, when in (("branch", "init"), ("branch", "trained"), ("branch-qk", "trained"))
        for seed in range(5) for block in range(13)
    ]  # fmt: skip
    pd.DataFrame(states, columns=branch.COLUMNS).to_csv(home / branch.STATES, index=False)
    jobs = []
    for blocks in (12, 6):
        jobs += pre_vs_post.grid(pre_vs_post.SIZE, blocks)
        jobs += pre_vs_post.confirmations(trained(runs, jobs), blocks, deepest=blocks == 12)
    deep = kept("pre_vs_post", [*jobs, *pre_vs_post.shapes(beside, pre_vs_post.SIZE)])
    depth = [
        (arm, blocks, seed, "dependence", variant, 3 + rng.normal(), 2.0, 4.0, 1, *rng.normal(2, 1, 2), "")
        for arm in ("pre", "post") for blocks in (12, 6) for seed in range(1, 6) for variant in ("", "first power")
    ]  # fmt: skip
    pd.DataFrame(depth, columns=trained_depth.COLUMNS).to_csv(home / f"{trained_depth.NAME}.csv", index=False)
    jobs = warmup.grid(warmup.SIZE, variants.TUNED, ("adamw",))
    chosen = runs.best(beside, arm="pre", optimizer="adamw")
    confirm = [job for arm in variants.TUNED
               for job in runs.again(runs.best(trained(runs, jobs), arm=arm), "confirm", variants.SEEDS)]  # fmt: skip
    norms = [job for suffix in variants.WORDS if suffix
             for job in runs.again(chosen, "norm", variants.SEEDS, arm=f"pre-{suffix}")]  # fmt: skip
    kept("variants", [*jobs, *confirm, *norms])
    arms = [f"{arm}{'-' if suffix else ''}{suffix}" for arm in ("pre", "post") for suffix in variants.WORDS]
    found = [(arm, seed, each.claim, each.sentence, rng.normal(0.5, 0.1), math.nan)
             for arm in arms if arm.startswith("pre") for seed in range(1, 6)
             for each in variants.criteria()]  # fmt: skip
    found += [(arm, 100 + seed, "G2" if arm.startswith("pre") else "G1", metric, rng.normal(0.5, 0.1), math.nan)
              for arm in arms for seed in range(10) for metric in ("weight", "median")]  # fmt: skip
    found[0] = (*found[0][:4], math.nan, math.nan)  # a seed that does not have the number
    pd.DataFrame(found, columns=variants.COLUMNS).to_csv(home / variants.NORM_FILE, index=False)
    jobs = [runs.Run("grid", arm, 12, 64, "adamw", lr, 500, 2000, 0) for lr in pairs.RATES for arm in pairs.PARALLEL]
    grid = trained(runs, jobs)
    jobs += [job for arm in pairs.PARALLEL for job in runs.again(runs.best(grid, arm=arm), "confirm", pairs.SEEDS)]
    jobs += [job for arm in ("pre", "post") for blocks in (12, 6)
             if pairs.same(deep, pairs.sequential(deep, arm, blocks)).empty
             for job in runs.again(pairs.sequential(deep, arm, blocks), "confirm", pairs.SEEDS)]  # fmt: skip
    kept("merge_twins", jobs)
    jobs = [runs.Run("updates", arm, 12, 64, "adamw", 2e-3, 0, 600, seed) for seed in range(1, 6)
            for arm in oscillation.ARMS]  # fmt: skip
    kept("oscillation", jobs)
    sizes = [(arm, seed, step, block, 0.01 * math.exp(rng.normal())) for arm in oscillation.ARMS
             for seed in range(1, 6) for step in (1, 2) for block in range(12)]  # fmt: skip
    pd.DataFrame(sizes, columns=["arm", "seed", "step", "block", "relative"]).to_csv(home / oscillation.SIZES)
    shifts = [(arm, blocks, seed, 0.1 + 0.01 * rng.random()) for arm in ("pre", "post") for blocks in (6, 12, 24)
              for seed in range(10)]  # fmt: skip
    pd.DataFrame(shifts, columns=["arm", "blocks", "seed", "shift"]).to_csv(home / oscillation.SHIFTS)
    (home / "gradient_norms.csv").symlink_to(RESULTS / "gradient_norms.csv")


def test_every_study_says_what_its_tables_hold(runs: ModuleType, study: ModuleType, tmp_path: Path) -> None:
    """Whole tables of all training studies: no row lacks a cell, intervals have smallest effects beside them."""
    tables(runs, tmp_path)
    findings = script("findings")
    sections = findings.read(tmp_path)
    names = {"gradient_norms", "warmup", "branch_norm", "pre_vs_post", "merge_twins", "variants"}
    assert {each.name for each in sections} == names
    said = findings.texts(sections)
    assert "G4: what a top-heavy gradient" in said["gradient_norms"]
    assert "4 of 5 |" in said["variants"]
    for name, text in said.items():
        for table in grids(text):
            assert {len(row) for row in table} == {len(table[0])}, name
            assert not any(has_interval(cell) for row in table for cell in row) or shows_power(table), (name, table[0])
    rows = grids(findings.headline(sections))[0]
    assert rows[0] == ["claim", "verdict", "effect [95 % interval over seeds]", "seeds"]
    assert len(rows) == 2 + sum(len({test.claim for test in each.tests}) for each in sections)
    assert max(len(cell) for row in rows for cell in row[:2]) < 120
    for each in sections:
        study.write_figures(each, tmp_path)
    links = {row[0]: row[5] for row in grids(said["claims"])[0][2:]}
    assert "merge_twins.png" in links["M3"]
    assert "gradient_norms.png" in links["G1"]
    assert "oscillation.png" in links["G4"]
    assert "pre_vs_post_shapes.png" in links["D3"]
    assert "pre_vs_post_depth.png" in links["D1"]


def grids(text: str) -> list[list[list[str]]]:
    """The tables in markdown, as cells."""
    found: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            found[-1].append([cell.strip() for cell in line[1:-1].split(" |")])
        elif found[-1]:
            found.append([])
    return [table for table in found if table]


def has_interval(cell: str) -> bool:
    return bool(re.search(r"\d \[[−\d.]+, [−\d.]+\]", cell))


def shows_power(table: list[list[str]]) -> bool:
    """A column of smallest effects, or each beside its interval."""
    return any("smallest effect" in head for head in table[0]) or all(
        "smallest effect" in cell for row in table[1:] for cell in row if has_interval(cell)
    )


def test_updates_and_shifts_by_hand(runs: ModuleType, tmp_path: Path) -> None:
    oscillation = script("oscillation")
    job = small(runs, "post", stage="updates", warmup=0, steps=3)
    runs.ensure(job, tmp_path)
    patched = pytest.MonkeyPatch()
    patched.setattr(oscillation, "FIRST", 2)
    rows = oscillation.updates(job, tmp_path)
    patched.undo()
    old, new = runs.model_of(job, tmp_path, 1), runs.model_of(job, tmp_path, 2)
    for block in range(2):
        pairs = [
            (a, b)
            for a, b in zip(old.model.blocks[block].parameters(), new.model.blocks[block].parameters(), strict=True)
            if a.ndim == 2
        ]
        moved = math.sqrt(sum(float((b - a).detach().double().square().sum()) for a, b in pairs))
        size = math.sqrt(sum(float(a.detach().double().square().sum()) for a, _ in pairs))
        assert (2, block, pytest.approx(moved / size, rel=1e-5)) in rows
    table = pd.DataFrame(
        [("post", seed, step, block, 0.01 * 2.0**block) for seed in (1, 2) for step in (1, 2) for block in range(3)],
        columns=["arm", "seed", "step", "block", "relative"],
    )
    np.testing.assert_allclose(oscillation.ratios(table, "post"), [-2 * math.log(2)] * 2)
    shifts = pd.DataFrame(
        [("pre", blocks, seed, 0.1 * blocks**0.25) for blocks in (6, 12, 24) for seed in range(2)],
        columns=["arm", "blocks", "seed", "shift"],
    )
    np.testing.assert_allclose(oscillation.exponent(shifts, "pre"), [0.25] * 2)


def test_fine_tuning_starts_from_equal_loss(runs: ModuleType, study: ModuleType) -> None:
    transfer = script("transfer")
    assert transfer.nearest({100: 2.5, 200: 2.1, 300: 1.9}, 2.05) == 200
    kept, held = transfer.split()
    assert not set(kept) & set(held)
    assert len(held) == -(-(len(kept) + len(held)) // transfer.EVERY)
    rows = [
        {"arm": arm, "seed": seed, "lr": lr, "step": 1, "level": 2.0, "pretrained": 2.0, "before": 2.0,
         "dev": loss + lr, "test": loss + 0.01 * (seed % 2)}
        for arm, loss in (("pre", 1.8), ("post", 1.7), ("embedding", 2.4))
        for lr in (1e-4, 1e-3) for seed in range(1, 6)
    ]  # fmt: skip
    table = pd.DataFrame(rows)
    before = pd.DataFrame(
        [
            (arm, "confirm", blocks, "failed" if blocks == 6 else "done")
            for arm in ("pre", "post")
            for blocks in (6, 12)
        ],
        columns=["arm", "stage", "blocks", "status"],
    )
    (test,) = transfer.primary(table, before)
    assert over_seeds(test.values).value == pytest.approx(-0.1)
    assert test.high == pytest.approx(-0.06)
    assert study.verdict(test, study.probability(test)) == "supported"
    assert set(transfer.chosen(table, "pre")["lr"]) == {1e-4}
    lost = before.assign(status=np.where((before["arm"] == "post") & (before["blocks"] == 12), "failed", "done"))
    assert "1 of post failed in pretraining" in transfer.primary(table, lost)[0].reason


def test_a_small_model_is_fine_tuned_from_the_step_nearest_to_the_level(
    runs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    transfer = script("transfer")
    monkeypatch.setattr(transfer, "STEPS", 10)
    table = {(arm, 1): small(runs, arm, steps=20) for arm in ("pre", "post")}
    ended = dict.fromkeys(table.values(), 2.0)  # they were trained elsewhere
    (row,) = transfer.fine_tune(table, ended, tmp_path, "pre", 1, 1e-3)
    assert capsys.readouterr().err.count("where its table has 2") == 2
    curves = [transfer.losses(tmp_path / run.name) for run in table.values()]
    level = max(min(curve.values()) for curve in curves)
    step = transfer.nearest(curves[0], level)
    assert row[:3] == (step, level, curves[0][step])
    assert row[5] < row[3]  # of the new text, after and before
    assert transfer.fine_tune(table, ended, tmp_path, "pre", 1, 1e-3) == [row]


def test_what_branch_norm_leaves_of_the_stream(runs: ModuleType, tmp_path: Path) -> None:
    """The coefficient is 1 by algebra; an entropy against a plain softmax."""
    branch = script("branch_norm")
    model = runs.model_of(small(runs, "branch-qk"), runs.ensure(small(runs, "branch-qk"), tmp_path).parent)
    rows = branch.measure(model, 0)
    assert rows[-1][-1] == pytest.approx(1.0, abs=1e-5)
    model.requires_grad_(False)
    ids = torch.randint(0, 200, (2, 64), generator=torch.Generator().manual_seed(0))
    x = model.model.token_embedding(ids) + model.model.position_embedding.weight[:64]
    attention = model.model.blocks[0].attention
    heads = attention.qkv(x).view(2, 64, 3, 4, 4)
    q, k = attention.query_norm(heads[:, :, 0]), attention.key_norm(heads[:, :, 1])
    found = []
    for batch in range(2):
        for head in range(4):
            for t in range(1, 64):
                weights = torch.softmax(k[batch, : t + 1, head] @ q[batch, t, head] / 2.0, dim=0)
                found.append(float(-(weights * weights.log()).sum()) / math.log(t + 1))
    assert branch.entropy(attention, x) == pytest.approx(float(np.mean(found)), rel=1e-4)


@pytest.fixture
def norms(study: ModuleType) -> pd.DataFrame:
    """Every number of every norm far inside what is predicted."""
    variants = script("variants")
    inside = {
        (each.claim, each.sentence): math.sqrt(max(each.low, 1e-4) * each.high) if math.isfinite(each.high) else 2.0
        for each in variants.criteria()
    }
    arms = [(place, f"{place}{suffix}") for place in ("pre", "post")
            for suffix in ("", "-rms", "-masked", "-batch", "-instance")]  # fmt: skip
    rows = [
        (arm, seed, claim, name, inside.get((claim, name), -1.0 if place == "post" else 0.0) * (1 + 1e-3 * seed), 1.0)
        for place, arm in arms for claim, name in variants.kinds(place)
        for seed in range(10 if claim in ("G1", "G2") else 5)
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=variants.COLUMNS)


def test_the_same_verdicts_for_another_norm(runs: ModuleType, study: ModuleType, norms: pd.DataFrame) -> None:
    variants = script("variants")

    def word(table: pd.DataFrame, **failed: int) -> str:
        return study.of_claim([pair for *_, pair in variants.pairs_of(table, failed)])

    def changed(arm: str, claim: str, value: float | list[float], column: str = "value") -> pd.DataFrame:
        here = (norms["arm"] == arm) & (norms["claim"] == claim)
        other = norms.copy()
        other.loc[here, column] = np.resize(value, here.sum())
        return other

    pairs = variants.pairs_of(norms, {})
    assert len(pairs) == 3 * (len(variants.criteria()) + 2 + 2)
    assert {pair for *_, pair in pairs} == {"supported"}
    assert word(norms) == "supported"
    assert word(changed("pre-rms", "R2", 2.0)) == "contradicted"  # the opposite
    assert word(changed("pre-rms", "R2", [0.5, 1.5])) == "undecided"  # one of them alone
    assert word(changed("post-batch", "G1", 0.0)) == "contradicted"
    assert word(norms, **{"pre-batch": 1}) == study.UNJUDGED  # a model that learned nothing has no say
    assert word(norms[~((norms["arm"] == "pre-instance") & (norms["seed"] == 4))]) == study.UNJUDGED
    assert word(norms[norms["arm"] != "pre-batch"]) == study.UNJUDGED  # a study that was stopped
    # a bad fit keeps an exponent from being as predicted, and not from lying elsewhere
    assert word(changed("pre-rms", "R1", 0.5, "fit")) == study.UNJUDGED
    exponent = next(each.sentence for each in variants.criteria() if "power law" in each.sentence)
    here = (norms["arm"] == "pre-rms") & (norms["criterion"] == exponent)
    elsewhere = norms.assign(value=np.where(here, 0.2, norms["value"]), fit=np.where(here, 0.5, 1.0))
    assert word(elsewhere) == "contradicted"
