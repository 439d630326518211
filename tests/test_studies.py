"""The studies of the claims: rows outlive a stop, tests are the preregistration's, findings are those of the tables."""

from __future__ import annotations

import importlib
import itertools
import math
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from depthprobe.checkpoint import load
from depthprobe.contrast import over_seeds, smallest_effect
from depthprobe.corpus import read
from depthprobe.errors import OutputError, UsageError
from depthprobe.estimate import Interval
from depthprobe.gradient import GradientSettings, run_gradients
from depthprobe.lab import LabConfig, LabForCausalLM
from depthprobe.verify import open_stream

ROOT = Path(__file__).parent.parent
README = (ROOT / "analyses" / "README.md").read_text()
LOG = math.log(1.1)


@pytest.fixture(scope="module")
def study() -> ModuleType:
    return script("study")


@pytest.fixture(scope="module")
def norms() -> ModuleType:
    return script("gradient_norms")


def script(name: str) -> ModuleType:
    """Scripts import each other as they do where they are run: from their own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "analyses"))
        return importlib.import_module(name)


# Rows


JOBS = [("a", 1), ("a", 2), ("b", 1)]
HEAD = ("name", "seed", "layer", "value")


def rows(name: str, seed: int) -> list[tuple[int, float]]:
    return [(layer, math.pi * seed + ord(name) + layer) for layer in range(2)]


def test_a_stopped_run_ends_with_the_same_table(study: ModuleType, tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole.csv", tmp_path / "stopped.csv"
    study.collect(whole, HEAD, JOBS, rows)
    made = []

    def stops(name: str, seed: int) -> list[tuple[int, float]]:
        if made == [("a", 1)]:
            raise KeyboardInterrupt
        made.append((name, seed))
        return rows(name, seed)

    with pytest.raises(KeyboardInterrupt):
        study.collect(stopped, HEAD, JOBS, stops)
    assert len(stopped.read_text().splitlines()) == 3
    seen = []
    study.collect(stopped, HEAD, JOBS, lambda *job: seen.append(job) or rows(*job))
    assert seen == JOBS[1:]
    assert stopped.read_bytes() == whole.read_bytes()
    assert [path.name for path in tmp_path.glob("*.part")] == []


def test_a_table_has_six_digits_and_nothing_for_what_does_not_exist(study: ModuleType, tmp_path: Path) -> None:
    study.collect(tmp_path / "t.csv", ("seed", "a", "b"), [(0,)], lambda seed: [(1 / 3, float("nan"))])
    assert (tmp_path / "t.csv").read_text() == "seed,a,b\n0,0.333333,\n"


@pytest.mark.parametrize("text", ["", "seed,other\n0,1\n", "seed,a,b\n0,1,2"])
def test_another_table_or_a_torn_one_is_left_alone(study: ModuleType, tmp_path: Path, text: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(OutputError, match="no table with the columns"):
        study.collect(tmp_path / "t.csv", ("seed", "a", "b"), [(0,)], lambda seed: [(1.0, 2.0)])
    assert (tmp_path / "t.csv").read_text() == text


# Tests over seeds


def primary(study: ModuleType, values: list[float], low: float, high: float) -> object:
    return study.Primary("X", "a test", tuple(values), low, high)


@pytest.mark.parametrize("shift", [-0.5, -0.2, -0.05, 0.0, 0.3])
def test_p_is_that_of_scipy(study: ModuleType, shift: float) -> None:
    values = list(np.random.default_rng(3).normal(shift, 0.1, 8))
    below = study.probability(primary(study, values, -math.inf, -LOG))
    assert below == pytest.approx(min(1.0, 2 * stats.ttest_1samp(values, -LOG, alternative="less").pvalue))
    same = study.probability(primary(study, values, -LOG, LOG))
    sides = [
        stats.ttest_1samp(values, -LOG, alternative="greater").pvalue,
        stats.ttest_1samp(values, LOG, alternative="less").pvalue,
    ]
    assert same == pytest.approx(min(1.0, 2 * max(sides)))


def test_p_is_below_5_percent_just_where_the_interval_lies_inside(study: ModuleType) -> None:
    rng = np.random.default_rng(0)
    inside = []
    for _ in range(200):
        values = list(rng.normal(rng.normal(0, 0.1), 0.05, 5))
        interval = over_seeds(values)
        inside.append(interval.low > -LOG and interval.high < LOG)
        assert inside[-1] == (study.probability(primary(study, values, -LOG, LOG)) < 0.05)
    assert 20 < sum(inside) < 180


def test_seeds_that_agree_exactly(study: ModuleType) -> None:
    assert study.probability(primary(study, [0.0, 0.0], -LOG, LOG)) == 0.0
    assert study.probability(primary(study, [0.2, 0.2], -LOG, LOG)) == 1.0


def test_holm_by_hand(study: ModuleType) -> None:
    assert study.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert study.holm([0.6, 0.7]) == pytest.approx([1.0, 1.0])
    assert study.holm([]) == []


def test_verdicts(study: ModuleType) -> None:
    below = primary(study, [-0.5, -0.4, -0.6], -math.inf, -LOG)
    assert study.verdict(below, 0.04) == "supported"
    assert study.verdict(below, 0.06) == "undecided"  # the interval alone would do, Holm does not
    assert study.verdict(primary(study, [0.5, 0.4, 0.6], -math.inf, -LOG), 1.0) == "contradicted"
    assert study.verdict(primary(study, [-0.5, -0.4, -0.6], -LOG, LOG), 1.0) == "contradicted"
    assert study.verdict(primary(study, [-0.5, 0.4, 0.6], -LOG, LOG), 1.0) == "undecided"
    assert study.of_claim(["supported", "supported"]) == "supported"
    assert study.of_claim(["supported", "undecided"]) == "undecided"
    assert study.of_claim(["supported", "contradicted", "undecided"]) == "contradicted"


@pytest.mark.parametrize(
    ("low", "high", "where"),
    [
        (0.10, 0.2, "outside"), (-0.3, -0.1, "outside"), (-0.09, 0.09, "inside"),
        (0.01, 0.2, "undecided"), (-0.2, 0.2, "undecided"), (0.09, 0.11, "undecided"),
    ],
)  # fmt: skip
def test_where_an_interval_lies(study: ModuleType, low: float, high: float, where: str) -> None:
    assert study.lies(Interval((low + high) / 2, low, high), -LOG, LOG) == where


def test_a_ratio_has_changed_if_its_interval_is_beyond_the_margin(study: ModuleType) -> None:
    assert study.changed([math.log(1.2), math.log(1.21), math.log(1.22)]) == "changed"
    assert study.changed([math.log(0.8), math.log(0.81), math.log(0.82)]) == "changed"
    assert study.changed([math.log(1.0), math.log(1.01), math.log(0.99)]) == "unchanged"
    assert study.changed([math.log(1.0), math.log(1.5), math.log(0.9)]) == "undecided"
    assert study.ratio([math.log(2), math.log(2)]) == "2.00 [2.00, 2.00]"


@pytest.mark.parametrize("count", [5, 10])
def test_smallest_effect_by_the_noncentral_t(study: ModuleType, count: int) -> None:
    values = list(np.random.default_rng(1).normal(0, 2, count))
    effect = study.smallest(values) / np.std(values, ddof=1)
    critical, shift = stats.t.ppf(0.975, count - 1), effect * math.sqrt(count)
    power = stats.nct.sf(critical, count - 1, shift) + stats.nct.cdf(-critical, count - 1, shift)
    assert power == pytest.approx(0.8, abs=1e-6)
    assert smallest_effect(5) == pytest.approx(1.7, abs=0.05)  # as the preregistration says


def test_a_test_in_a_few_words(study: ModuleType) -> None:
    """What it measures, and where the mean was predicted, as a factor where its values are logs."""
    below = study.Primary("X", "a loss, nats; predicted below −0.1", (-0.3, -0.2), -math.inf, -0.1, logs=False)
    assert (study.label(below), study.region(below)) == ("a loss, nats", "predicted below −0.100")
    same = study.Primary("X", "a long sentence", (0.0, 0.1), -LOG, LOG, label="a ratio")
    assert (study.label(same), study.region(same)) == ("a ratio", "predicted 0.909 to 1.10")
    more = study.Primary("X", "", (0.0, 0.1), math.log(2), math.inf, against=True)
    assert study.region(more) == "above 2.00 contradicts the claim"
    assert study.label(study.Counted("X", "runs; predicted above 0, or failures", 1, 0, 5)) == "runs"
    values = [0.0, 0.3]
    assert study.least(values, logs=True) == f"× {study.number(math.exp(smallest_effect(2) * np.std(values, ddof=1)))}"


def test_the_headline_is_short_and_marks_what_was_changed(study: ModuleType) -> None:
    findings = script("findings")
    tests = (
        study.Primary("R1", "a long sentence; predicted 1", (0.3, 0.8), 0.9, 1.1, logs=False, label="the exponent"),
        study.Primary("M1", "an error; predicted below 0.1", (0.3, 0.2, 0.25), -math.inf, 0.1, logs=False),
        study.Unjudged("M1", "another; predicted below 0.1", "none was made"),
    )
    notes = {"R1": "more"}
    part = study.Section("x", tests, lambda found: "", (), {"R1": "", "M1": ""}, notes, ("R1",))
    rows = [line.strip("| ").split(" | ") for line in findings.headline([part]).splitlines() if line.startswith("|")]
    assert rows[2] == [
        "The stream is a sum of terms of equal size, so that it grows like t (R1)", "**undecided** †",
        f"the exponent: {study.span(over_seeds([0.3, 0.8]))} (predicted 0.900 to 1.10)", "2",
    ]  # fmt: skip
    assert rows[3][1:] == [
        "**contradicted**",
        f"an error: {study.span(over_seeds([0.3, 0.2, 0.25]))} (predicted below 0.100, contradicted)"
        "<br>another: none was made (cannot be judged here)", "3/–",
    ]  # fmt: skip
    whole = findings.claims([part], study.adjusted(tests))
    assert f"(smallest effect {study.least([0.3, 0.8])})<br>A test was changed when its rows were known" in whole


# The README


def test_a_section_is_replaced_and_nothing_else(study: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("before\n<!-- x: begin -->\nold\n<!-- x: end -->\nafter\n")
    study.write_section(path, "x", "new\n\n| a |")
    assert path.read_text() == "before\n<!-- x: begin -->\nnew\n\n| a |\n<!-- x: end -->\nafter\n"
    assert study.section(path.read_text(), "x") == "new\n\n| a |"
    with pytest.raises(OutputError, match="no section of y"):
        study.write_section(path, "y", "new")


def test_the_readme_says_what_the_tables_say(study: ModuleType) -> None:
    """Every part of the findings, and the table of all claims, is what `findings.py` makes of data/results/ now."""
    findings = script("findings")
    sections = findings.read(ROOT / "data" / "results")
    for name, text in findings.texts(sections).items():
        assert study.section(README, name) == text, name
    headline = (ROOT / "README.md").read_text()
    assert study.section(headline, "findings") == findings.headline(sections)
    brief, whole = findings.side_by_side(ROOT / "data" / "results")
    assert (study.section(headline, "benchmark"), study.section(README, "benchmark")) == (brief, whole)


# gradient_norms.py


@pytest.fixture(scope="module")
def gradients() -> pd.DataFrame:
    return pd.read_csv(ROOT / "data" / "results" / "gradient_norms.csv")


def test_every_arm_was_measured_alike(norms: ModuleType, gradients: pd.DataFrame) -> None:
    arms = (
        gradients.groupby(["text", "placement", "blocks", "sequences"])["seed"].agg(["nunique", "size"]).reset_index()
    )
    assert len(arms) == 3 * 3 * 4
    assert set(arms["nunique"]) == {norms.SEEDS}
    assert (arms["size"] == norms.SEEDS * (arms["blocks"] + 1)).all()


@pytest.mark.parametrize("placement", ["pre", "post", "branch"])
def test_norms_are_those_of_the_library(norms: ModuleType, placement: str) -> None:
    model = lab(placement)
    ids = torch.randint(0, 30, (3, 12), generator=torch.Generator().manual_seed(1))
    mine = pd.DataFrame(norms.norms(model, ids), columns=norms.COLUMNS[len(norms.KEYS) :])
    checkpoint, corpus = load(model), read(ids, None)
    theirs = run_gradients(open_stream(checkpoint, ids), corpus, GradientSettings("loss")).table

    def found(metric: str, unit: str = "block") -> np.ndarray:
        part = theirs[(theirs["metric"] == metric) & (theirs["unit"] == unit)].sort_values("layer")
        return part["value"].to_numpy()

    pooled = found("weight_gradient_norm_pooled", "mlp.outer.weight")  # of the mean loss, as the batch's is
    np.testing.assert_allclose(mine["weight"][:-1], pooled, rtol=1e-4)
    np.testing.assert_allclose(mine["weight_rest"][:-1], without_position_0(model, ids), rtol=1e-4)
    np.testing.assert_allclose(3 * mine["median"], found("gradient_norm_median"), rtol=1e-4)  # a third is each one's
    np.testing.assert_allclose(3 * mine["mean"], found("gradient_norm"), rtol=1e-4)
    np.testing.assert_allclose(mine["first_share"], found("gradient_first_share"), rtol=1e-4)
    assert mine["weight"].isna().tolist() == [False] * 3 + [True]
    assert mine["skip_mlp"].notna().tolist() == [placement == "post"] * 3 + [False]


def without_position_0(model: LabForCausalLM, ids: torch.Tensor) -> list[float]:
    """Norms of the second matrices' gradients where position 0 is given copies of them that have none."""
    layers = [block.mlp.outer for block in model.model.blocks]

    def swap(layer: torch.nn.Linear, given: tuple[torch.Tensor, ...], made: torch.Tensor) -> torch.Tensor:
        fixed = torch.nn.functional.linear(given[0][:, :1], layer.weight.detach(), layer.bias)
        return torch.cat([fixed, made[:, 1:]], dim=1)

    hooks = [layer.register_forward_hook(swap) for layer in layers]
    found = torch.autograd.grad(model(ids, labels=ids).loss, [layer.weight for layer in layers])
    for hook in hooks:
        hook.remove()
    return [float(gradient.norm()) for gradient in found]


def test_what_the_skips_leave_by_hand(norms: ModuleType) -> None:
    model = lab("post")
    ids = torch.randint(0, 30, (2, 9), generator=torch.Generator().manual_seed(1))
    mine = list(norms.norms(model, ids))
    inner = model.model
    with torch.no_grad():
        s = inner.token_embedding(ids) + inner.position_embedding.weight[:9]
        for layer, block in enumerate(inner.blocks):
            for place, (branch, skip) in enumerate(
                [(lambda x, b=block: b.attention(x, None, None)[0], block.attention_skip), (block.mlp, block.mlp_skip)]
            ):
                y = s + branch(s)
                left = (s.norm(dim=-1) / y.norm(dim=-1))[:, 1:].numpy()
                assert mine[layer][6 + place] == pytest.approx(float(np.median(left, axis=1).mean()), rel=1e-5)
                s = skip.norm_after(y)


def lab(placement: str) -> LabForCausalLM:
    torch.manual_seed(5)
    sizes = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 3, "max_position_embeddings": 12}
    return LabForCausalLM(LabConfig(placement=placement, **sizes))


def test_the_same_rows_again_and_arms_matched(study: ModuleType, norms: ModuleType, gradients: pd.DataFrame) -> None:
    """The table's rows come again, whatever ran before; a seed has the same sequences in every arm."""
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for text, placement, sequences in (("manual", "post", 4), ("library", "pre", 16)):
            again = np.array(list(norms.measure(text, placement, 6, sequences, 3)))
            there = study.arm(gradients, placement=placement, text=text, blocks=6, sequences=sequences)
            there = there[there["seed"] == 3][list(norms.COLUMNS[len(norms.KEYS) :])].to_numpy()
            np.testing.assert_allclose(again, there, rtol=1e-3)  # another machine's sums differ in the last bits
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(norms.batch("manual", 64, 3)[:4], norms.batch("manual", 4, 3))
    assert not torch.equal(norms.batch("manual", 4, 3), norms.batch("manual", 4, 4))


def test_ratios_and_verdicts_of_a_table_with_a_known_answer(study: ModuleType, norms: ModuleType) -> None:
    """Post falls by 2 a block, pre is flat, and its top shrinks like 1/√L: both claims hold, with these numbers."""
    table = made_up(norms)
    post = study.arm(table, placement="post", **norms.MAIN)
    for metric in ("weight", "weight_rest", "median"):
        assert np.mean(norms.logs(post, metric)) == pytest.approx(-11 * math.log(2), abs=0.01)
    np.testing.assert_allclose(norms.log_product(post), 11 * math.log(0.4))
    assert np.mean(norms.top_slope(table, "weight")) == pytest.approx(-0.5, abs=0.01)
    said = told(norms, table)
    assert re.findall(r"\| (G\d) \| \*\*(\w+)\*\*", said) == [("G1", "supported")] * 2 + [("G2", "supported")] * 2
    assert said.count("(inside, smallest effect ") == 2
    other = table.assign(placement=table["placement"].replace({"pre": "post", "post": "pre"}), skip_attention=0.5)
    said = told(norms, other.assign(skip_mlp=0.5))
    assert re.findall(r"\| (G\d) \| \*\*(\w+)\*\*", said)[::2] == [("G1", "contradicted"), ("G2", "contradicted")]


def made_up(norms: ModuleType) -> pd.DataFrame:
    rng, lines = np.random.default_rng(0), []
    arms = itertools.product(("manual", "library"), ("pre", "post", "branch"), (6, 12, 24), range(10))
    for text, placement, blocks, seed in arms:
        for layer in range(blocks + 1):
            size = 2.0 ** (layer - blocks) if placement == "post" else blocks**-0.5
            size *= math.exp(rng.normal(0, 1e-3))
            inside = layer < blocks
            skips = [0.5, 0.8] if placement == "post" and inside else [math.nan, math.nan]
            weights = [size, size] if inside else [math.nan, math.nan]
            lines.append((text, placement, blocks, 16, seed, layer, *weights, size, size, 0.1, *skips))
    return pd.DataFrame(lines, columns=norms.COLUMNS)


def told(norms: ModuleType, table: pd.DataFrame) -> str:
    """The part of the README that a table gives."""
    with TemporaryDirectory() as folder:
        table.to_csv(Path(folder) / "gradient_norms.csv", index=False)
        section = norms.section(Path(folder))
        return section.text(norms.study.adjusted(section.tests))


def test_a_small_run_from_the_command_line(
    norms: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A study prints its part; findings.py puts it into the README with its figure, and says what is missing."""
    monkeypatch.setattr(norms, "BATCHES", (2,))
    monkeypatch.setattr(norms, "MAIN", {"text": "manual", "blocks": 2, "sequences": 2})
    line = ["--depths", "2,3", "--seeds", "2", "--results", str(tmp_path / "gradient_norms.csv"), "--untrained"]
    assert norms.main(line) == 0
    said = capsys.readouterr().out
    readme = tmp_path / "README.md"
    marks = [f"<!-- {name}: begin -->\n\n<!-- {name}: end -->\n" for name in ("claims", "gradient_norms")]
    readme.write_text("\n".join(marks))
    findings = script("findings")
    where = ["--results", str(tmp_path), "--figures", str(tmp_path / "figures"), "--readme", str(readme)]
    (tmp_path / "top.md").write_text("<!-- findings: begin -->\n\n<!-- findings: end -->\n")
    where += ["--headline", str(tmp_path / "top.md")]
    assert findings.main(where) == 0
    assert "warmup.py has nothing to say yet" in capsys.readouterr().err
    part = norms.study.section(readme.read_text(), "gradient_norms")
    assert part in said
    assert "| W1 |" in norms.study.section(readme.read_text(), "claims")
    assert "tested yet" in (tmp_path / "top.md").read_text()
    assert (tmp_path / "figures" / "gradient_norms.png").stat().st_size > 10_000
    assert norms.main(["--depths", "1"]) == UsageError.exit_code
