"""Through how many branches the gradient came: against every path written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from by_hand import corpus_of, opened
from families import build, ids
from paths_by_hand import (
    Pair,
    Paths,
    block_units,
    gauged,
    gradient,
    jacobian,
    lab_start,
    lab_sums,
    lab_tail,
    matrices,
    parallel_units,
    sublayer_units,
    tokens_trace,
)
from torch import Tensor, nn

from depthprobe.depth import jacobians as under_test
from depthprobe.depth import passages
from depthprobe.depth.base import DepthSettings
from depthprobe.depth.jacobians import Jacobians
from depthprobe.depth.path_elasticity import path_elasticity
from depthprobe.depth.path_elasticity_raw import path_elasticity_raw
from depthprobe.lab import LabConfig, LabForCausalLM
from depthprobe.probes.base import key_rng

IDS = ids(2, 6, vocab=20)
PLACEMENTS = ["pre", "post", "branch", "sandwich", "deepnorm", "admin"]


def lab(placement: str, blocks: int = 3, **options: Any) -> LabForCausalLM:
    """A tiny model in float64, its gains and biases moved away from 1 and 0."""
    torch.manual_seed(0)
    chosen = {"placement": "post", "initialisation": "admin"} if placement == "admin" else {"placement": placement}
    config = LabConfig(
        vocab_size=20, max_position_embeddings=8, hidden_size=8, num_hidden_layers=blocks, num_attention_heads=2,
        **chosen, **options,
    )  # fmt: skip
    model = LabForCausalLM(config).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def lab_paths(model: LabForCausalLM, unit: str, first: int = 0) -> Paths:
    """All paths of a lab model, from block `first` on."""
    paths, sums = Paths(skip=1), lab_sums(model)
    for row in IDS:
        units, x = (sublayer_units if unit == "sublayer" else block_units)(sums), lab_start(model, row)
        pairs, last = matrices(units, x)
        paths.add(pairs[first * len(units) // len(model.model.blocks) :], gradient(lab_tail(model, row), last))
    return paths


# --- against every path ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["block", "sublayer"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_raw_is_that_of_all_paths(placement: str, unit: str) -> None:
    model = lab(placement)
    found = path_elasticity_raw(opened(model, IDS), corpus_of(IDS), unit)
    paths = lab_paths(model, unit)
    assert found.value("path_elasticity_raw").value == pytest.approx(paths.elasticity, rel=1e-9)
    assert found.value("direct_share_raw").value == pytest.approx(paths.direct_share, rel=1e-9)
    assert found.value("path_elasticity_raw").of == (3 if unit == "block" else 6)
    curve = found.curves["first_blocks"]
    assert curve["elasticity"][1] == pytest.approx(lab_paths(model, unit, first=1).elasticity, rel=1e-9)
    assert found.value("path_elasticity_raw", "from block 2").value == curve["elasticity"][2]
    assert found.value("path_elasticity_raw", "from block 2").of == (1 if unit == "block" else 2)


@pytest.mark.parametrize("unit", ["block", "sublayer"])
def test_a_path_passes_one_of_two_parallel_sublayers(unit: str) -> None:
    model = build("neox").double()
    paths = Paths(skip=1)
    for row in IDS:
        units, (x,) = parallel_units(model, "neox", row)
        pairs, last = matrices(units, x)

        def tail(state: Tensor, row: Tensor = row) -> Tensor:
            logits = model.lm_head(model.gpt_neox.final_layer_norm(state))
            return nn.functional.cross_entropy(logits[0, :-1], row[1:])

        paths.add(pairs, gradient(tail, last))
    found = path_elasticity_raw(opened(model, IDS), corpus_of(IDS), unit)
    assert found.value("path_elasticity_raw").value == pytest.approx(paths.elasticity, rel=1e-6)  # softmax in float32
    assert found.value("direct_share_raw").value == pytest.approx(paths.direct_share, rel=1e-6)
    assert found.value("path_elasticity_raw").of == (3 if unit == "block" else 6)
    profile = path_elasticity(opened(model, IDS), corpus_of(IDS), unit).curves["profile"]
    assert list(profile["unit"]) == (["block"] * 3 if unit == "block" else ["attention", "mlp"] * 3)


def exact_traces(self: Jacobians, tape: Any, index: int, ran: Any) -> list[tuple[Tensor, ...]]:
    """α from whole Jacobians instead of random vectors."""
    found = []
    for step in ran.steps:
        alphas = []
        for update in step.updates:
            matrix = torch.stack([passages._vjp(update, step.x, row) for row in _basis(step.x)])
            alphas.append(tokens_trace(matrix.flatten(1), step.x)[None, :, None])
        found.append(tuple(alphas))
    return found


def _basis(x: Tensor) -> Tensor:
    return torch.eye(x.numel(), dtype=x.dtype).reshape(-1, *x.shape)


def signs_of(row: int) -> Tensor:
    return torch.from_numpy(key_rng(0, row, under_test._SIGNS).integers(0, 2, IDS.shape[1] - 1) * 2 - 1)


@pytest.mark.parametrize(
    ("placement", "unit"), [*((name, "sublayer") for name in PLACEMENTS), ("pre", "block"), ("post", "block")]
)
def test_the_gauge_is_that_of_all_paths(placement: str, unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Jacobians, "traces", exact_traces)
    model = lab(placement)
    paths = Paths(skip=1)
    for place, row in enumerate(IDS):
        x = lab_start(model, row)
        pairs, last = gauged(lab_sums(model), x)
        if unit == "block":
            pairs = _of_blocks(model, pairs, x)
        paths.add(pairs, gradient(lab_tail(model, row, signs_of(place)), last))
    found = path_elasticity(opened(model, IDS), corpus_of(IDS), unit)
    assert found.value("path_elasticity").value == pytest.approx(paths.elasticity, rel=1e-9)
    assert found.value("direct_share").value == pytest.approx(paths.direct_share, rel=1e-9)
    assert found.curves["profile"]["value"].sum() == pytest.approx(paths.elasticity, rel=1e-9)


def _of_blocks(model: LabForCausalLM, pairs: list[Pair], x: Tensor) -> list[Pair]:
    """Of a pre-LN block, its own trace; of a post-LN block, the gauged identity paths of both sublayers."""
    found = []
    for unit, a, m in zip(block_units(lab_sums(model)), pairs[::2], pairs[1::2], strict=True):
        whole = jacobian(unit.whole, x)
        if model.config.placement == "pre":
            identity = torch.diag(tokens_trace(whole, x).repeat_interleave(x.shape[-1]))
        else:
            identity = m[0] @ a[0]
        found.append((identity, whole - identity))
        x = unit.whole(x).detach()
    return found


def test_traces_are_those_of_the_jacobians() -> None:
    model, many = lab("post"), DepthSettings(probes=4000)
    with Jacobians("test", opened(model, IDS), corpus_of(IDS), "sublayer", many) as run:
        tape = run.forward(0)
        for index in (0, 3):
            ran = run.at(tape, index)
            (estimate,), (exact,) = run.traces(tape, index, ran)[0], exact_traces(run, tape, index, ran)[0]
            assert estimate.shape == (1, 6, 1)
            torch.testing.assert_close(estimate, exact, atol=0.02, rtol=0)


@pytest.mark.parametrize("name", ["llama", "bert", "gemma3", "mixtral", "falcon-sequential"])
def test_the_profile_sums_to_the_whole_in_float32(name: str) -> None:
    """Also with fused attention and with experts, neither of which can be run in forward mode."""
    model = build(name, attention="sdpa")
    for unit in ("block", "sublayer"):
        found = path_elasticity(opened(model, IDS + 4), corpus_of(IDS + 4), unit)
        parts = found.curves["profile"]
        assert parts["value"].sum() == pytest.approx(found.rows[0].value, rel=1e-4)
        assert len(parts) == found.rows[0].of


# --- a broken estimator is noticed -----------------------------------------------------------------------------------


def _no_norm(ran: Any, cotangent: Tensor, alphas: Any = None) -> Tensor:
    return cotangent


@pytest.mark.parametrize("broken", ["identity path", "dropped term", "shift"])
def test_what_is_broken_is_noticed(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lab("post")
    paths = lab_paths(model, "block")
    if broken == "identity path":
        monkeypatch.setattr(passages.RanUnit, "identity", _no_norm)
    elif broken == "dropped term":
        monkeypatch.setattr(passages.Pulled, "gone", property(lambda self: 0 * self.through[0]))
    else:
        at = Jacobians.at
        monkeypatch.setattr(Jacobians, "at", lambda self, tape, index: at(self, tape, min(index + 1, 2)))
    found = path_elasticity_raw(opened(model, IDS), corpus_of(IDS))
    assert abs(found.value("path_elasticity_raw").value - paths.elasticity) > 1e-2  # the calibration allows 1e-3


# --- what is reported, and what is refused ---------------------------------------------------------------------------


def test_intervals_are_of_ratios_of_sums_and_the_model_is_as_it_was() -> None:
    model = lab("pre").float()
    model.lm_head.weight.requires_grad_(False)
    inputs = ids(6, 8, vocab=20)
    anatomy, corpus = opened(model, inputs), corpus_of(inputs)
    progress: list[tuple[int, int]] = []
    found = path_elasticity_raw(anatomy, corpus, "block", None, lambda *done: progress.append(done))
    row = found.value("path_elasticity_raw")
    sums = found.per_sequence[""]
    assert row.value == pytest.approx(sums[:, 0].sum() / sums[:, 1].sum(), rel=1e-12)
    assert row.ci_low < row.value < row.ci_high
    assert progress[-1] == (6, 6)
    assert not model.lm_head.weight.requires_grad
    assert all(p.grad is None for p in model.parameters())
    assert sum(p.requires_grad for p in model.parameters()) == len(list(model.parameters())) - 1
    again = path_elasticity(anatomy, corpus), path_elasticity(anatomy, corpus)
    assert again[0].rows == again[1].rows
    other = path_elasticity(anatomy, corpus, settings=DepthSettings(seed=1))
    assert other.rows[0].value != again[0].rows[0].value


def test_half_precision_is_taken_in_float32() -> None:
    model = lab("pre").bfloat16()
    half = path_elasticity_raw(opened(model, IDS), corpus_of(IDS)).rows[0].value
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert half == pytest.approx(
        path_elasticity_raw(opened(model.float(), IDS), corpus_of(IDS)).rows[0].value, rel=1e-5
    )


def test_one_sequence_has_no_interval() -> None:
    found = path_elasticity(opened(lab("pre"), IDS), corpus_of(IDS[:1]))
    assert np.isnan([found.rows[0].ci_low, found.curves["profile"]["ci_low"][0]]).all()
