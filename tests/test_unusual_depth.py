"""Effective depth of what is hardly a model or hardly a text: stated results or one line, and never a wrong figure."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console
from test_report_depth import deepened
from torch import nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

import depthprobe
from depthprobe import cli, effective
from depthprobe.controls import random_tokens
from depthprobe.corpus import Corpus
from depthprobe.depth.base import DepthSettings
from depthprobe.effective import Effective, Plan, joined, run_effective, with_phases
from depthprobe.errors import NonFiniteError, UsageError
from depthprobe.lab import LabConfig, LabForCausalLM, LabModel
from depthprobe.prepare import prepare
from depthprobe.report import Report, figures
from depthprobe.report.panels import LIGHT
from depthprobe.report.screen import show_depth

QUICK = ("dependence", "crossing", "lens", "participation", "elasticity")


def tiny(**sizes: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    given = {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 32, "vocab_size": 60, **sizes}
    return GPT2LMHeadModel(GPT2Config(**given, bos_token_id=0, eos_token_id=0)).eval()


def lab(kind: type[nn.Module] = LabForCausalLM, **choices: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "vocab_size": 60}
    return kind(LabConfig(**{**sizes, **choices})).eval()


def encoder(norm_first: bool) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()


def ids(sequences: int = 6, tokens: int = 12, vocabulary: int = 60) -> Any:
    return np.random.default_rng(0).integers(0, vocabulary, (sequences, tokens))


def states() -> torch.Tensor:
    return torch.randn(6, 12, 16, generator=torch.Generator().manual_seed(0))


def estimated(model: nn.Module, data: Any, **options: Any) -> Effective:
    """The estimates, none of them without a number, and each in the note or in the table."""
    found = depthprobe.effective_depth(model, data, **{"estimators": QUICK, **options})
    assert np.isfinite(found.table["value"]).all()
    assert (found.table["of"] > 0).all()
    reasons = {one["name"]: one["reason"] for one in found.details["estimators"]}
    for name, reason in reasons.items():
        assert not reason or f"{name} was left out: {reason}." in found.details["notes"]
    return found


def value(found: Effective, name: str, variant: str = "") -> float:
    rows = found.table[(found.table["name"] == name) & (found.table["variant"] == variant)]
    assert len(rows) == 1, found.table
    return float(rows["value"].iloc[0])


def left_out(found: Effective) -> dict[str, str]:
    return {one["name"]: one["reason"] for one in found.details["estimators"] if one["reason"]}


# --- little text, little model ---------------------------------------------------------------------------------------


def test_one_block_is_all_that_writes() -> None:
    found = estimated(tiny(n_layer=1), ids(), controls=())
    assert value(found, "participation") == 1
    assert 0 < value(found, "dependence") <= 1
    assert value(estimated(tiny(n_layer=1), ids(), controls=(), unit="sublayer"), "participation") <= 2


def test_one_sequence_has_values_and_no_interval_and_says_so() -> None:
    found = estimated(tiny(), ids(1), estimators=(*QUICK, "stages"))
    assert found.table["ci_low"].isna().all()
    assert not found.table["passes_gate"].any()
    assert "expected at least 2 sequences" in left_out(found)["stages"]
    notes = found.details["notes"]
    assert "There is one sequence, so that no estimate of effective depth has an interval." in notes
    assert not any("1 sequences" in note for note in notes)


def test_intervals_are_said_to_rest_on_documents_where_they_do() -> None:
    checkpoint, corpus, anatomy = prepare(tiny(), ids(8))
    del checkpoint
    three = replace(corpus, documents=np.array([0, 0, 0, 1, 1, 2, 2, 2]))
    found = run_effective(anatomy, three, Plan(("crossing",), controls=()), DepthSettings())
    assert "The intervals rest on 3 documents; below 32 they tend to be too narrow." in found.details["notes"]


def test_two_tokens_leave_no_gradient_and_the_rest_goes_on() -> None:
    found = estimated(tiny(), ids(6, 2))
    assert set(left_out(found)) == {"elasticity"}
    assert "use longer sequences" in left_out(found)["elasticity"]
    assert {"dependence", "participation", "cosine_crossing"} <= set(found.table["name"])


@pytest.mark.parametrize("skip", [12, 500])
def test_skipping_everything_is_refused(skip: int) -> None:
    with pytest.raises(UsageError, match="leaves nothing of sequences of 12 tokens"):
        depthprobe.effective_depth(tiny(), ids(), skip_first=skip)


@pytest.mark.parametrize(("data", "vocabulary"), [(np.full((6, 12), 7), 60), (ids(vocabulary=2), 2)])
def test_one_token_and_two(data: Any, vocabulary: int) -> None:
    found = estimated(tiny(vocab_size=vocabulary), data, estimators=None)
    assert left_out(found) == {}
    assert found.table.set_index(["name", "variant"])["value"]["stages", "10%"] >= 0


# --- unusual models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("unit", ["block", "sublayer"])
def test_modules_of_states(norm_first: bool, unit: Any) -> None:
    found = estimated(encoder(norm_first), states(), unit=unit)
    assert found.table["of"].max() == (3 if unit == "block" else 6)
    assert "lens" in left_out(found)  # no head
    assert "random-init could not be made: nothing says how" in " ".join(found.details["notes"])
    assert not found.table["passes_gate"].any()


def test_scores_that_are_handed_on_leave_what_watches_the_stream_alone_out() -> None:
    for unit in ("block", "sublayer"):
        found = estimated(lab(residual_attention=True), ids(), unit=unit, controls=())
        assert set(left_out(found)) == {"dependence", "elasticity"}
        assert all("hand on more beside it" in reason for reason in left_out(found).values())
        assert "participation" in set(found.table["name"])


def test_pairs_side_by_side_have_no_sublayers() -> None:
    model = lab(parallel_pairs="sublayers", placement="post")
    assert estimated(model, ids(), controls=()).table["of"].max() == 2
    with pytest.raises(UsageError, match="branches were not found in block 0; expected whole blocks"):
        depthprobe.effective_depth(model, ids(), unit="sublayer")


@pytest.mark.parametrize(
    "choices",
    [
        {"placement": "deepnorm"},
        {"layernorm_scaling": True},
        {"norm": "batchnorm", "causal": False},
        {"placement": "none"},
        {"placement": "post", "initialisation": "admin"},
    ],
)
def test_every_build_of_the_lab(choices: dict[str, Any]) -> None:
    kind = LabForCausalLM if choices.get("causal", True) else LabModel
    found = estimated(lab(kind, **choices), ids(), controls=("random-init",))
    assert {"dependence", "path_elasticity"} <= set(found.table["name"])
    assert {row["control"] for row in found.details["controls"]} == {"random-init"}


def test_half_precision_and_tied_embeddings() -> None:
    whole = estimated(lab(tie_word_embeddings=True), ids(), controls=())
    for dtype in (torch.bfloat16, torch.float16):
        found = estimated(lab(tie_word_embeddings=True).to(dtype), ids(), controls=())
        assert value(found, "dependence") == pytest.approx(value(whole, "dependence"), rel=0.1)
        assert any("half precision" in note for note in found.details["notes"])


def test_a_head_that_reads_nothing_and_blocks_that_do_nothing() -> None:
    blind = tiny()
    blind.transformer.ln_f.weight.data.zero_()
    found = estimated(blind, ids(), controls=())
    assert "the gradient at the first state is 0" in left_out(found)["elasticity"]
    assert value(found, "participation") == value(found, "dependence") == 0
    idle = tiny()
    for name, parameter in idle.named_parameters():
        if "c_proj" in name:
            parameter.data.zero_()
    found = estimated(idle, ids(), controls=())
    assert value(found, "participation") == value(found, "dependence") == value(found, "path_elasticity") == 0


def test_a_model_that_overflows_is_one_line() -> None:
    model = tiny()
    model.transformer.h[1].mlp.c_proj.weight.data *= 1e38
    with pytest.raises(NonFiniteError, match="block 2 writes values that are not finite"):
        depthprobe.effective_depth(model, ids())
    for place in (0, 1, 2):
        model = tiny()
        model.transformer.h[place].mlp.c_fc.weight.data[0, 0] = torch.nan
        with pytest.raises(NonFiniteError, match=f"block {place} writes values that are not finite"):
            depthprobe.effective_depth(model, ids())
    model = tiny()
    model.transformer.ln_f.weight.data[0] = torch.nan
    with pytest.raises(NonFiniteError, match="the output of GPT2LMHeadModel is not finite"):
        depthprobe.effective_depth(model, ids())


def test_random_tokens_of_states_keep_their_size() -> None:
    checkpoint, corpus, _ = prepare(encoder(True), states())
    drawn = random_tokens(checkpoint, corpus, 0)
    assert drawn.inputs.shape == corpus.inputs.shape
    assert drawn.inputs.std() == pytest.approx(float(corpus.inputs.std()), rel=0.1)


# --- a report that is estimated again --------------------------------------------------------------------------------


def prepared() -> tuple[Report, Any, Corpus]:
    report = depthprobe.analyze(tiny(), ids(), ablations=False, gradient_tokens=0, depth_tokens=0)
    _, corpus, anatomy = prepare(tiny(), ids())
    return report, anatomy, corpus


def test_a_second_run_leaves_nothing_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    report, anatomy, corpus = prepared()
    first = joined(report, run_effective(anatomy, corpus, Plan(("dependence",), controls=()), DepthSettings()))
    assert (first.pairs["metric"] == "update_dependence").any()
    second = joined(first, run_effective(anatomy, corpus, Plan(("crossing",), controls=()), DepthSettings()))
    assert second.pairs.equals(report.pairs)
    assert set(second.depth["name"]) == {"cosine_crossing"}

    def refuse(*_: Any) -> Any:
        raise UsageError("the states are odd")

    once = with_phases(report, anatomy, corpus, DepthSettings())
    assert once.phases
    monkeypatch.setattr(effective, "phases", refuse)
    twice = with_phases(with_phases(once, anatomy, corpus, DepthSettings()), anatomy, corpus, DepthSettings())
    assert twice.phases == {}
    assert [note for note in twice.notes if "Phases" in note] == [
        "Phases of computation were left out: the states are odd."
    ]
    monkeypatch.undo()
    assert with_phases(twice, anatomy, corpus, DepthSettings()).notes == once.notes


# --- some estimators alone -------------------------------------------------------------------------------------------


def only(*curves: str) -> Report:
    report = deepened()
    kept = {name: found for name, found in report.deep["curves"].items() if name in curves}
    if "elasticity/profile" in curves:
        rows = [[layer, "block", 0.1, 0.05, 0.15] for layer in range(12)]
        kept["elasticity/profile"] = {"columns": ["layer", "unit", "value", "ci_low", "ci_high"], "rows": rows}
    return replace(report, deep={**report.deep, "curves": kept})


def axes_of(report: Report, name: str) -> list[Any]:
    panel = figures._BY_NAME[name]
    axes = list(Figure().subplots(panel.rows, 1, squeeze=False)[:, 0])
    panel.draw(report, axes, LIGHT)
    return axes


@pytest.mark.parametrize(("curve", "empty"), [("elasticity/profile", 0), ("dependence/profile", 1)])
def test_an_axis_without_data_says_so(curve: str, empty: int) -> None:
    axes = axes_of(only(curve), "depth_profile")
    for place, ax in enumerate(axes):
        assert [text.get_text() for text in ax.texts] == (["not estimated"] if place == empty else [])
        assert bool(ax.lines) == (place != empty)


def test_one_estimate_stands_amid_its_controls() -> None:
    (ax,) = axes_of(deepened(), "depth")
    bottom, top = ax.get_ylim()
    assert (bottom, top) == (0.5, -0.5)


def test_estimators_that_count_nothing_are_no_table_but_a_page(tmp_path: Path) -> None:
    report, anatomy, corpus = prepared()
    found = joined(report, run_effective(anatomy, corpus, Plan(("effects",), controls=()), DepthSettings()))
    found.save(tmp_path / "report")
    assert not (tmp_path / "report" / "depth.csv").exists()
    assert (tmp_path / "report" / "figures" / "effects.png").exists()
    assert Report.load(tmp_path / "report").depth.empty
    screen = io.StringIO()
    show_depth(found, Console(file=screen))
    assert screen.getvalue().strip() == "No number of units was estimated."


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main([str(argument) for argument in arguments])
    return int(stop.value.code or 0)


@pytest.mark.parametrize("command", ["depth", "ablate", "gradients"])
@pytest.mark.parametrize("gib", ["nan", "inf", "-1", "0", "1e-12"])
def test_memory_that_is_none(command: str, gib: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "nowhere", "--memory", gib) == 2
    error = capsys.readouterr().err.strip()
    assert error.endswith("expected a number of GiB, more than 0")
    assert len(error.splitlines()) == 1


def test_skipping_everything_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny().save_pretrained(tmp_path / "tiny")
    np.save(tmp_path / "ids.npy", ids())
    given = ("--data", tmp_path / "ids.npy", "--skip-first", 12, "--out", tmp_path / "out")
    assert run("depth", tmp_path / "tiny", *given) == 2
    error = capsys.readouterr().err
    assert "--skip-first 12 leaves nothing of sequences of 12 tokens" in error
    assert "measuring" not in error
    assert not (tmp_path / "out").exists()


def test_what_could_not_be_estimated_is_on_the_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertModel(BertConfig(**sizes, intermediate_size=32, max_position_embeddings=32)).save_pretrained(tmp_path / "bert")
    np.save(tmp_path / "ids.npy", ids())
    given = ("depth", tmp_path / "bert", "--data", tmp_path / "ids.npy", "--control", "none", "--no-phases")
    assert run(*given, "--estimators", "stages", "--out", tmp_path / "a") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "No number of units was estimated. stages was left out: stages are counted by KL" in said
    assert run(*given, "--estimators", "stages,crossing", "--out", tmp_path / "a") == 0
    assert "stages was left out" in " ".join(capsys.readouterr().out.split())
    assert set(pd.read_csv(tmp_path / "a" / "depth.csv")["name"]) == {"cosine_crossing"}
