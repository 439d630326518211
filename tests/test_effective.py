"""`effective_depth`: controls, the gate's word on each row, what is left out and why, and how it joins a report."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from by_hand import corpus_of, opened
from families import build, ids
from report_samples import sample
from torch import nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

import depthprobe
from depthprobe import effective as under_test
from depthprobe.controls import of_draws, random_init, random_tokens
from depthprobe.corpus import Corpus, read
from depthprobe.depth.base import COLUMNS, SEQ_LEN, Depth, DepthSettings, shortened
from depthprobe.depth.dependence import dependence
from depthprobe.depth.gate import Verdict
from depthprobe.depth.path_elasticity import path_elasticity
from depthprobe.depth.suite import ESTIMATORS, chosen, run_estimators, weight
from depthprobe.effective import (
    Plan,
    effective_cost,
    effective_depth,
    joined,
    quick,
    run_effective,
    with_effective,
)
from depthprobe.errors import UsageError
from depthprobe.lab.tasks import make_task
from depthprobe.report import Report

SETTINGS = DepthSettings()


def tiny(seed: int = 0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = GPT2Config(
        n_embd=16, n_layer=3, n_head=2, n_positions=32, vocab_size=60, bos_token_id=0, eos_token_id=0,
        initializer_range=0.2,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="module")
def everything() -> under_test.Effective:
    return effective_depth(tiny(), ids(6, 16, vocab=60).numpy())


class TestTable:
    def test_every_estimator_has_its_rows(self, everything: under_test.Effective) -> None:
        table = everything.to_frame()
        assert list(table.columns) == list(COLUMNS)
        for made in ESTIMATORS.values():
            assert set(made.metrics) <= set(table["name"]), made.name
        assert np.isfinite(table["value"]).all()
        assert (table["ci_low"] <= table["value"] + 1e-9).all()
        assert (table["value"] <= table["ci_high"] + 1e-9).all()
        whole = table[~table["variant"].str.startswith("from block")]
        assert (whole["of"] == 3).all()
        assert set(table["unit"]) == {"block"}

    def test_it_is_shown_in_one_line(self, everything: under_test.Effective) -> None:
        passed = int(everything.table["passes_gate"].sum())
        rows = len(everything.table)
        assert repr(everything) == f"Effective({rows} estimates, of which {passed} pass the gate)"

    def test_a_row_is_what_the_estimator_gives(self, everything: under_test.Effective) -> None:
        inputs = ids(6, 16, vocab=60)
        anatomy, corpus = opened(tiny(), inputs), corpus_of(inputs)
        for alone in (dependence(anatomy, corpus), path_elasticity(anatomy, corpus)):
            for row in alone.rows:
                mine = everything.table[
                    (everything.table["name"] == row.name) & (everything.table["variant"] == row.variant)
                ]
                assert mine[["value", "ci_low", "ci_high"]].to_numpy()[0] == pytest.approx(
                    [row.value, row.ci_low, row.ci_high], rel=1e-6
                )

    def test_curves_and_pairs(self, everything: under_test.Effective) -> None:
        profile = everything.curve("elasticity/profile")
        value = everything.table.set_index(["name", "variant"]).loc[("path_elasticity", ""), "value"]
        assert profile["value"].sum() == pytest.approx(value, rel=1e-5)
        assert {"stages/stages", "dependence/weights", "effects/effects", "crossing/thresholds"} <= set(
            everything.details["curves"]
        )
        assert set(everything.pairs["metric"]) == {"update_dependence"}

    def test_costs_stand_beside(self, everything: under_test.Effective) -> None:
        for one in everything.details["estimators"]:
            assert one["forward"] > 0
            assert one["seconds"] >= 0
            assert all(metric["does"] and metric["misses"] for metric in one["metrics"])


class TestControls:
    def test_they_are_the_same_estimators_on_the_twin_and_on_random_tokens(
        self, everything: under_test.Effective
    ) -> None:
        inputs = ids(6, 16, vocab=60)
        anatomy, corpus = opened(tiny(), inputs), corpus_of(inputs)
        held = {(row["control"], row["name"], row["variant"]): row["value"] for row in everything.details["controls"]}
        twins = [dependence(random_init(anatomy, corpus, seed), corpus).rows[0] for seed in range(3)]
        other = random_tokens(anatomy.stream.checkpoint, corpus, 0)
        mean = np.mean([row.value for row in twins])
        assert held["random-init", "dependence", ""] == pytest.approx(mean, rel=1e-6)
        row = next(
            row
            for row in everything.details["controls"]
            if (row["control"], row["name"], row["variant"]) == ("random-init", "dependence", "")
        )
        assert row["ci_low"] == pytest.approx(min(row.ci_low for row in twins), rel=1e-6)
        assert row["ci_high"] == pytest.approx(max(row.ci_high for row in twins), rel=1e-6)
        assert held["random-tokens", "dependence", ""] == pytest.approx(
            dependence(anatomy, other).rows[0].value, rel=1e-6
        )
        assert held["random-init", "dependence", ""] != pytest.approx(held["random-tokens", "dependence", ""])

    def test_the_twin_has_other_weights_and_the_model_is_as_it_was(self) -> None:
        model, inputs = tiny(), ids(4, 16, vocab=60)
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        anatomy = opened(model, inputs)
        twin = random_init(anatomy, corpus_of(inputs), 3).stream.checkpoint.model
        assert not torch.equal(twin.lm_head.weight, model.lm_head.weight)
        assert twin.config.n_layer == model.config.n_layer
        assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())

    def test_the_twin_of_a_half_precision_model_rounds_as_it_does(self) -> None:
        model, inputs = tiny().bfloat16(), ids(4, 16, vocab=60)
        twin = random_init(opened(model, inputs), corpus_of(inputs), 3).stream.checkpoint
        assert twin.dtype == torch.bfloat16
        full = random_init(opened(tiny(), inputs), corpus_of(inputs), 3).stream.checkpoint
        assert full.dtype == torch.float32
        assert torch.equal(twin.model.lm_head.weight, full.model.lm_head.weight.bfloat16())  # the same draw
        rotary = random_init(opened(build("llama").bfloat16(), ids(4, 16)), corpus_of(ids(4, 16)), 3)
        assert rotary.stream.checkpoint.model.model.rotary_emb.inv_freq.dtype == torch.float32

    def test_of_several_draws(self) -> None:
        def held(value: float, low: float, high: float) -> dict[tuple[str, str], Depth]:
            return {("a", ""): Depth("a", "block", "", value, low, high, 3)}

        made = of_draws([held(1.0, 0.5, 1.2), held(2.0, 1.9, 2.5), held(3.0, 0.9, 3.1)])["a", ""]
        assert (made.value, made.ci_low, made.ci_high) == (2.0, 0.5, 3.1)
        assert of_draws([held(1.0, 0.5, 1.2), {}]) == {}
        assert np.isnan(of_draws([held(1.0, np.nan, np.nan), held(2.0, 1.9, 2.5)])["a", ""].ci_high)

    def test_one_twin_if_asked_for(self) -> None:
        data = ids(6, 16, vocab=60).numpy()
        found = effective_depth(tiny(), data, estimators=["dependence"], controls=["random-init"], twins=1)
        anatomy, corpus = opened(tiny(), ids(6, 16, vocab=60)), corpus_of(ids(6, 16, vocab=60))
        mine = next(row for row in found.details["controls"] if row["variant"] == "")
        assert mine["value"] == pytest.approx(dependence(random_init(anatomy, corpus, 0), corpus).rows[0].value)
        with pytest.raises(UsageError, match="--twins 0"):
            effective_depth(tiny(), data, twins=0)

    def test_random_tokens_keep_shape_and_what_every_sequence_begins_with(self) -> None:
        inputs = ids(5, 400, vocab=60)
        inputs[:, 0] = 7
        corpus = corpus_of(inputs)
        made = random_tokens(opened(tiny(), inputs[:, :16]).stream.checkpoint, corpus, 0)
        assert made.inputs.shape == inputs.shape
        assert made.inputs.dtype == inputs.dtype
        assert (made.inputs[:, 0] == 7).all()
        assert made.sha256 != corpus.sha256
        counts = torch.bincount(made.inputs[:, 1:].flatten(), minlength=60)
        assert counts.min() > 0
        assert counts.max() < 3 * counts.float().mean()
        part = random_tokens(opened(tiny(), inputs[:, :16]).stream.checkpoint, corpus.take(slice(0, 2)), 0)
        assert torch.equal(part.inputs, made.inputs[:2])  # by (seed, sequence)

    def test_random_states_have_the_spread_of_the_corpus(self) -> None:
        generator = torch.Generator().manual_seed(0)
        states = 3 + 2 * torch.randn(40, 50, 4, generator=generator)
        net = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2).eval()
        made = random_tokens(opened(net, states[:2]).stream.checkpoint, corpus_of(states), 0).inputs
        assert made.flatten(0, 1).mean(0).numpy() == pytest.approx(3, abs=0.2)
        assert made.flatten(0, 1).std(0).numpy() == pytest.approx(2, abs=0.15)

    def test_random_states_keep_the_first_state_that_all_begin_with(self) -> None:
        states = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))
        net = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2).eval()
        checkpoint = opened(net, states[:2]).stream.checkpoint
        states[:, 0, 1:] = states[0, 0, 1:]
        assert not (random_tokens(checkpoint, corpus_of(states), 0).inputs == states).any()
        states[:, 0] = states[0, 0]
        drawn = random_tokens(checkpoint, corpus_of(states), 0).inputs
        assert torch.equal(drawn[:, 0], states[:, 0])
        assert not (drawn[:, 1:] == states[:, 1:]).any()
        half = states.to(torch.bfloat16)
        assert torch.equal(random_tokens(checkpoint, corpus_of(half), 0).inputs[:, 0], half[:, 0])

    def test_without_a_control_nothing_passes(self) -> None:
        found = effective_depth(tiny(), ids(6, 16, vocab=60).numpy(), estimators=["dependence"], controls=[])
        assert not found.table["passes_gate"].any()
        assert found.details["controls"] == []

    def test_a_model_that_cannot_be_initialised_says_so(self) -> None:
        states = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(0))
        net = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3).eval()
        found = effective_depth(net, states, estimators=["dependence", "stages"])
        assert any("random-init could not be made" in note for note in found.details["notes"])
        assert any("stages was left out" in note for note in found.details["notes"])
        assert set(found.table["name"]) == {"dependence"}


class TestGate:
    def test_the_word_is_that_of_the_gate(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is asked: the row's interval, and the controls' of the same name and variant."""
        asked = []

        def judge(name, variant, model, controls, clusters):  # type: ignore[no-untyped-def]
            assert clusters == 6
            asked.append((name, variant, model.value, {key: found.value for key, found in controls.items()}))
            return Verdict(variant == "", "because")

        monkeypatch.setattr(under_test, "judge", judge)
        found = effective_depth(tiny(), ids(6, 16, vocab=60).numpy(), estimators=["dependence"])
        assert found.table["passes_gate"].tolist() == [True, False]
        assert found.table["note"].tolist() == ["", "gate: because"]
        held = {(row["control"], row["variant"]): row["value"] for row in found.details["controls"]}
        for _, variant, value, controls in asked:
            assert value == found.table.set_index("variant").loc[variant, "value"]
            assert controls == {name: held[name, variant] for name in ("random-init", "random-tokens")}

    def test_stages_are_judged_by_the_half_that_scores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = {}

        def judge(name, variant, model, controls, clusters):  # type: ignore[no-untyped-def]
            asked[name] = clusters
            return Verdict(True, "because")

        monkeypatch.setattr(under_test, "judge", judge)
        effective_depth(tiny(), ids(10, 16, vocab=60).numpy(), estimators=["stages", "dependence"], controls=[])
        assert asked == {"dependence": 10, "stages": 5}

    def test_quick_leaves_out_what_costs_much(self) -> None:
        plan = quick(30)
        plan.check()
        assert {"crossing", "lens"} <= set(plan.estimators or ())
        assert "stages" not in (plan.estimators or ())


class TestRuns:
    def test_skip_runs_are_shared(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from depthprobe.depth import suite

        inputs, calls = ids(4, 12, vocab=60), []
        real = suite.run_skips
        monkeypatch.setattr(suite, "run_skips", lambda *given, **named: calls.append(1) or real(*given, **named))
        ran = run_estimators(opened(tiny(), inputs), corpus_of(inputs), ["score", "participation", "effects"])
        assert len(calls) == 1
        assert all(one.estimate is not None for one in ran)

    def test_progress_rises_to_the_end(self) -> None:
        seen: list[tuple[int, int]] = []
        effective_depth(
            tiny(), ids(4, 12, vocab=60).numpy(), estimators=["dependence", "score", "participation"],
            progress=lambda done, total: seen.append((done, total)),
        )  # fmt: skip
        done = [share for share, _ in seen]
        assert done == sorted(done)
        assert seen[-1][0] == seen[-1][1]

    def test_sublayers(self) -> None:
        found = effective_depth(tiny(), ids(4, 12, vocab=60).numpy(), unit="sublayer", estimators=["dependence"])
        assert set(found.table["unit"]) == {"sublayer"}
        assert any("counted whole blocks" in note for note in found.details["notes"])
        assert (found.table["of"] == 6).all()

    def test_an_encoder_without_a_head_has_what_needs_none(self) -> None:
        config = BertConfig(
            vocab_size=60, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=32,
        )  # fmt: skip
        torch.manual_seed(0)
        found = effective_depth(BertModel(config).eval(), ids(4, 12, vocab=60).numpy(), controls=[])
        names = set(found.table["name"])
        assert {"dependence", "cosine_crossing", "participation", "path_elasticity"} <= names
        assert not {"stages", "lens_kl_depth"} & names
        notes = " ".join(found.details["notes"])
        assert "stages was left out" in notes
        assert "lens was left out" in notes

    def test_what_is_refused(self) -> None:
        data = ids(4, 12, vocab=60).numpy()
        for options, words in (
            ({"estimators": ["depth"]}, "stages, dependence"),
            ({"estimators": []}, "some of"),
            ({"unit": "head"}, "block or sublayer"),
            ({"controls": ["shuffled"]}, "random-init"),
            ({"skip_first": 12}, "leaves nothing"),
        ):
            with pytest.raises(UsageError, match=words):
                effective_depth(tiny(), data, **options)  # type: ignore[arg-type]

    def test_the_cost_is_said_beforehand(self) -> None:
        corpus = corpus_of(ids(4, 12, vocab=60))
        said = effective_cost(corpus, Plan(("dependence", "raw"), controls=()), 10)
        assert said == "Effective depth by dependence, raw: about 18 forward passes over 4 × 12 tokens."
        assert weight(chosen(None), 30) > weight(["stages"], 30)
        assert weight(["score", "participation"], 10) == weight(["score"], 10)

    def test_shortened(self) -> None:
        inputs = torch.arange(200).reshape(10, 20)
        corpus = Corpus(inputs, np.arange(10), "text", "0" * 64, "no BOS", cuttable=True)
        part = shortened(corpus, 40, 8)
        assert part.inputs.tolist() == [list(range(row * 20, row * 20 + 8)) for row in (0, 2, 4, 7, 9)]
        assert part.documents.tolist() == [0, 2, 4, 7, 9]  # type: ignore[union-attr]

    def test_sequences_that_were_given_are_taken_whole(self) -> None:
        """A part of an image or of a task is another input; and an encoder's ids would lose their SEP."""
        images = read(torch.randn(40, 197, 3, generator=torch.Generator().manual_seed(0)), None, tokens=10**4)
        part = shortened(images, 512, 32)
        assert torch.equal(part.inputs, images.inputs[[0, 6, 11, 17, 22, 28, 33, 39]])  # what the gate needs
        task = make_task("chase", 5).validation[0]
        assert shortened(read(task, None), 512, 32).inputs.shape == (9, 52)
        long = torch.zeros(9, 1000, dtype=torch.int64)
        assert shortened(read(long, None, tokens=9000), 512, 32).inputs.shape == (2, 1000)
        assert shortened(read(long[:1], None, tokens=9000), 512, 32).inputs.shape == (1, 1000)


def test_joined_to_a_report_and_back(everything: under_test.Effective, tmp_path: Path) -> None:
    report = joined(replace(sample(), corpus={**sample().corpus, "sha256": everything.details["sha256"]}), everything)
    again = Report.load(report.save(tmp_path / "report").parent)
    assert again.depth["value"].tolist() == everything.table["value"].tolist()
    assert again.deep["curves"].keys() == everything.details["curves"].keys()
    table = pd.read_csv(tmp_path / "report" / "depth.csv")
    assert tuple(table.columns) == COLUMNS
    assert table["value"].tolist() == everything.table["value"].tolist()
    assert "update_dependence" in set(again.pairs["metric"])
    twice = joined(report, everything)
    assert len(twice.pairs) == len(report.pairs)
    elsewhere = joined(sample(), everything)
    assert any("all else on" in note for note in elsewhere.deep["notes"])


def test_the_verb_is_public() -> None:
    assert depthprobe.effective_depth is effective_depth
    assert depthprobe.Effective is under_test.Effective
    report = depthprobe.analyze(tiny(), ids(8, 16, vocab=60).numpy(), ablations=False, gradient_tokens=0)
    assert {"cosine_crossing", "lens_kl_depth"} <= set(report.depth["name"])
    assert report.phases["sequences"] == 8
    without = depthprobe.analyze(tiny(), ids(8, 16, vocab=60).numpy(), ablations=False, depth_tokens=0)
    assert without.depth.empty
    assert not without.phases
    with pytest.raises(UsageError, match="depth_tokens"):
        depthprobe.analyze(tiny(), ids(8, 16, vocab=60).numpy(), depth_tokens=-1)


def test_half_precision_runs() -> None:
    inputs = ids(4, 12, vocab=60)
    anatomy = opened(tiny().to(torch.bfloat16), inputs)
    found = run_effective(anatomy, read(inputs, None), Plan(("dependence",)), SETTINGS)
    assert np.isfinite(found.table["value"]).all()


def test_text_is_cut_into_more_and_shorter_sequences() -> None:
    path = Path(__file__).resolve().parents[1] / "data" / "gpt2-manual"
    checkpoint = depthprobe.load(path)
    given = {"tokens": 2048, "max_positions": checkpoint.max_positions}
    corpus = read(None, checkpoint.tokenizer, **given, usual_len=SEQ_LEN)
    assert (corpus.sequences, corpus.tokens) == (16, 128)
    assert read(None, checkpoint.tokenizer, **given, seq_len=64, usual_len=SEQ_LEN).tokens == 64
    found = effective_depth(path, tokens=512, estimators=["crossing"], controls=[])
    assert (found.details["sequences"], found.details["tokens"]) == (4, 128)


def test_sequences_are_spread_over_more_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 sequences are read for the tokens of 16, and every fourth one is taken."""
    seen: list[Corpus] = []
    monkeypatch.setattr(under_test, "run_effective", lambda anatomy, corpus, *_: seen.append(corpus))
    data = torch.arange(64 * 16).reshape(64, 16) % 60
    effective_depth(tiny(), data.numpy(), tokens=256)
    assert seen[0].inputs[:, 0].tolist() == [int(data[row, 0]) for row in np.linspace(0, 63, 16).round().astype(int)]


def test_a_report_says_that_text_was_cut() -> None:
    inputs = ids(12, 24, vocab=60)
    report = depthprobe.analyze(tiny(), inputs.numpy(), ablations=False, gradient_tokens=0, depth_tokens=0)
    anatomy, text = opened(tiny(), inputs), replace(read(inputs, None), cuttable=True)
    said = "Depth was estimated on the first 8 of 24 tokens."
    assert said in with_effective(report, anatomy, shortened(text, 96, 8), SETTINGS).deep["notes"]
    assert not any("cut to" in note for note in with_effective(report, anatomy, text, SETTINGS).deep["notes"])
