"""Clusters of layers: on streams that turn by known angles, against plain loops, and what a report shows of them."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import corpus_of, opened
from depth_by_hand import lab
from families import REPO, ids
from PIL import Image
from report_samples import headless, one_block, sample
from sklearn.metrics import silhouette_score
from test_staging import Net, identity
from torch import Tensor, nn

from depthprobe import Report
from depthprobe.depth.base import DepthSettings
from depthprobe.depth.phases import Phases, boundaries, cluster, even, phases, squared_distances
from depthprobe.errors import NonFiniteError, UsageError
from depthprobe.estimate import Resampler
from depthprobe.prepare import prepare
from depthprobe.report import figures
from depthprobe.report.panels import DARK, LIGHT
from depthprobe.report.phase_panels import PHASE_PANELS, finding, spans
from depthprobe.stream import Entry, Stream

INPUTS = ids(12, 16, vocab=50)
KNOWN = [0.02, 0.02, 0.9, 0.02, 0.02, 0.02, 0.9, 0.02, 0.02]  # by which each block turns the stream


class Turned(nn.Module):
    """Turns every state by the same angle, whatever its direction."""

    def __init__(self, angle: float) -> None:
        super().__init__()
        self.angle = nn.Parameter(torch.tensor(angle))

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        cos, sin = self.angle.cos(), self.angle.sin()
        return torch.cat([cos * a - sin * b, sin * a + cos * b], dim=-1)


class Adds(nn.Module):
    """Adds one vector to every state."""

    def __init__(self, seed: int, size: float) -> None:
        super().__init__()
        self.bias = nn.Parameter(size * torch.randn(16, generator=torch.Generator().manual_seed(seed)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def turning(angles: list[float]) -> Net:
    return Net([Turned(angle) for angle in angles], 2)


def found(model: nn.Module, inputs: Tensor = INPUTS, documents: np.ndarray | None = None, **options: Any) -> Phases:
    settings = DepthSettings(**{k: options.pop(k) for k in ("seed", "batch_size", "skip_first") if k in options})
    corpus = replace(corpus_of(inputs), documents=documents)
    return phases(opened(model, inputs), corpus, settings, resamples=15, **options)


def merged_by_hand(squared: np.ndarray) -> list[int]:
    """Ward's merging of neighbours, from sums of squared distances within clusters; the last boundary first."""

    def within(low: int, high: int) -> float:
        return float(squared[low : high + 1, low : high + 1].sum() / (2 * (high - low + 1)))

    ranges, removed = [(state, state) for state in range(len(squared))], []
    while len(ranges) > 1:
        costs = [within(a[0], b[1]) - within(*a) - within(*b) for a, b in pairwise(ranges)]
        place = int(np.argmin(costs))
        removed.append(ranges[place][1])
        ranges[place : place + 2] = [(ranges[place][0], ranges[place + 1][1])]
    return removed[::-1]


class TestClustering:
    def test_the_angles_that_are_known(self) -> None:
        result = found(turning(KNOWN))
        at = np.concatenate([[0], np.cumsum(KNOWN)])
        np.testing.assert_allclose(result.cosines, np.tile(np.cos(at[:, None] - at), (12, 1, 1)), atol=1e-6)
        assert result.clusters is not None
        assert result.clusters.count == 3
        assert result.clusters.ends == ((0, 2), (3, 6), (7, 9))
        assert result.clusters.clear
        between = result.clusters.between
        assert between[between["chosen"]]["after"].tolist() == [2, 6]
        np.testing.assert_array_equal(between["share"], [0, 0, 1, 0, 0, 0, 1, 0, 0])
        np.testing.assert_allclose(between["distance"], 2 * np.sin(np.array(KNOWN) / 2), rtol=1e-3)
        assert result.clusters.counts["share"].tolist() == [0, 1, 0, 0, 0, 0, 0]
        assert not [note for note in result.notes if "clear" in note]

    def test_an_even_drift_has_no_phases(self) -> None:
        result = found(turning([0.25] * 9))
        assert result.clusters is not None
        assert not result.clusters.clear
        counts = result.clusters.counts
        assert counts["silhouette"].max() <= counts["drift"].max() + 1e-3
        assert counts["silhouette"].max() > 0.25  # which alone would have been taken for phases
        assert any(note.startswith("No clear phases") for note in result.notes)

    def test_a_random_initialisation_has_no_phases(self) -> None:
        result = found(lab(blocks=8))
        assert result.clusters is not None
        assert not result.clusters.clear

    def test_what_all_tokens_share_is_taken_out(self) -> None:
        blocks = [Adds(k, 3.0 if k in (2, 5) else 0.01) for k in range(8)]
        result = found(Net(blocks, 2))
        assert result.clusters is not None
        assert result.clusters.ends == ((0, 2), (3, 5), (6, 8))
        assert result.centred is None  # nothing but the shared vector changes
        assert any("share" in note for note in result.notes)
        turned = found(turning(KNOWN))
        assert turned.centred is not None
        assert turned.centred.ends == ((0, 2), (3, 6), (7, 9))

    @pytest.mark.parametrize("seed", range(6))
    def test_merging_by_hand(self, seed: int) -> None:
        steps = np.random.default_rng(seed).normal(size=(14, 5))
        walk = np.cumsum(steps * np.random.default_rng(seed + 9).exponential(size=(14, 1)), axis=0)
        squared = ((walk[:, None] - walk) ** 2).sum(axis=-1)
        assert boundaries(squared).tolist() == merged_by_hand(squared)

    def test_one_large_step_does_not_decide(self) -> None:
        """A single state far from all others, in the middle of a cluster's neighbours, is no boundary of two phases."""
        at = np.array([0.0, 0.1, 0.2, 0.3, 3.0, 3.1, 3.2, 3.3, 5.0, 5.1, 5.2, 5.3])
        squared = (at[:, None] - at) ** 2
        assert boundaries(squared)[:2].tolist() == [3, 7]

    def test_silhouettes_by_hand(self) -> None:
        result = found(turning(KNOWN)).clusters
        assert result is not None
        at = np.concatenate([[0], np.cumsum(KNOWN)])
        distance = 2 * np.abs(np.sin((at[:, None] - at) / 2))
        label = np.array([0] * 3 + [1] * 4 + [2] * 3)
        values = []
        for state in range(10):
            own = distance[state][(label == label[state]) & (np.arange(10) != state)].mean()
            other = min(distance[state][label == k].mean() for k in range(3) if k != label[state])
            values.append((other - own) / max(own, other))
        assert result.best["silhouette"] == pytest.approx(np.mean(values), abs=1e-3)
        assert result.best["silhouette"] == pytest.approx(
            silhouette_score(distance, label, metric="precomputed"), abs=1e-3
        )

    def test_an_even_drift_keeps_the_means_of_lags(self) -> None:
        squared = np.random.default_rng(0).random((5, 5))
        squared = squared + squared.T
        made = even(squared)
        assert made[1, 3] == made[0, 2] == pytest.approx(np.mean([squared[0, 2], squared[1, 3], squared[2, 4]]))
        assert made[4, 0] == squared[0, 4]

    def test_distances_are_those_of_unit_vectors(self) -> None:
        x = np.random.default_rng(0).normal(size=(6, 9))
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        want = ((x[:, None] - x) ** 2).sum(axis=-1)
        np.testing.assert_allclose(squared_distances(x @ x.T), want, atol=1e-12)


class TestSpread:
    def test_resamples_of_sequences_that_disagree(self) -> None:
        """Half of the sequences turn at one block, half at another: resamples choose by which they have more of."""
        one, other = (np.concatenate([[0], np.cumsum(a)]) for a in ([0.02, 1.5, 0.02, 0.02], [0.02, 0.02, 1.5, 0.02]))
        grams = np.stack([np.cos(at[:, None] - at) for at in (one, other)] * 6)
        result = cluster(grams, Resampler(12, None, 0, 60))
        assert result is not None
        share = result.between["share"].to_numpy()
        assert 0.2 < share[1] <= 1
        assert 0.2 < share[2] <= 1
        assert share[0] < 0.2
        assert result.counts["share"].sum() == pytest.approx(1)
        assert (result.counts["ci_low"] <= result.counts["silhouette"]).all()
        assert (result.counts["silhouette"] <= result.counts["ci_high"]).all()

    def test_shares_by_hand(self) -> None:
        """Each sequence turns by angles of its own; every resample is clustered again, in plain loops."""
        steps = np.random.default_rng(4).exponential(0.3, size=(8, 7))
        at = np.concatenate([np.zeros((8, 1)), np.cumsum(steps, axis=1)], axis=1)
        grams, draws = np.cos((at[:, :, None] - at[:, None]) / 2), Resampler(8, None, 3, 40)
        counted, cut = np.zeros(6), np.zeros(7)
        for gram in draws.replicates(grams.reshape(8, -1)).reshape(-1, 8, 8):
            squared = 2 - 2 * gram
            np.fill_diagonal(squared, 0)
            order, values = merged_by_hand(squared), []
            for count in range(2, 8):
                labels = np.array([sum(state > b for b in order[: count - 1]) for state in range(8)])
                values.append(silhouette_score(np.sqrt(np.maximum(squared, 0)), labels, metric="precomputed"))
            counted[int(np.argmax(values))] += 1
            cut[order[: int(np.argmax(values)) + 1]] += 1
        result = cluster(grams, draws)
        assert result is not None
        np.testing.assert_allclose(result.counts["share"], counted / 40)
        np.testing.assert_allclose(result.between["share"], cut / 40)
        assert ((cut > 0) & (cut < 40)).sum() > 2  # or the test would say nothing

    def test_the_order_of_sequences_changes_nothing(self) -> None:
        model = lab(blocks=6)
        forth, back = found(model), found(model, INPUTS.flip(0))
        for a, b in ((forth.clusters, back.clusters), (forth.centred, back.centred)):
            assert a is not None
            assert b is not None
            assert a.ends == b.ends
            np.testing.assert_allclose(a.counts["silhouette"], b.counts["silhouette"], atol=1e-9)
            np.testing.assert_allclose(a.between["distance"], b.between["distance"], atol=1e-9)

    def test_batches_change_nothing(self) -> None:
        model = lab(blocks=6)
        whole, parts = found(model, batch_size=12), found(model, batch_size=5)
        np.testing.assert_allclose(whole.cosines, parts.cosines, atol=1e-6)
        assert whole.clusters is not None
        assert parts.clusters is not None
        assert whole.clusters.ends == parts.clusters.ends
        np.testing.assert_allclose(whole.clusters.counts, parts.clusters.counts, atol=1e-4)

    def test_long_sequences_are_multiplied_in_parts(self) -> None:
        inputs = ids(2, 150, vocab=50)
        model = Net([Turned(0.3), Adds(0, 1.0), Turned(0.2)], 2)
        result = found(model, inputs)
        with torch.no_grad():
            states = [model.embed(inputs)]
            for block in model.blocks:
                states.append(block(states[-1]))
        x = torch.stack(states)[:, :, 1:].double()
        for i in range(4):
            for j in range(4):
                want = torch.cosine_similarity(x[i], x[j], dim=-1).mean(dim=1).numpy()
                np.testing.assert_allclose(result.cosines[:, i, j], want, atol=1e-6)

    def test_documents_are_resampled_whole(self) -> None:
        owners = np.repeat([0, 1], 6)
        with_documents, without = found(lab(blocks=4), documents=owners), found(lab(blocks=4))
        assert with_documents.clusters is not None
        assert without.clusters is not None
        assert not np.allclose(with_documents.clusters.counts["ci_low"], without.clusters.counts["ci_low"])


class TestEdges:
    def test_one_block(self) -> None:
        result = found(turning([0.5]))
        assert result.clusters is None
        assert any("one block" in note for note in result.notes)
        assert not result.readable.table.empty

    def test_two_blocks(self) -> None:
        result = found(turning([0.05, 1.0]))
        assert result.clusters is not None
        assert result.clusters.ends == ((0, 1), (2, 2))
        assert result.clusters.counts["count"].tolist() == [2]

    def test_blocks_that_do_nothing(self) -> None:
        result = found(identity(4))
        assert result.clusters is None
        assert any("do not differ" in note for note in result.notes)

    def test_one_sequence(self) -> None:
        result = found(turning(KNOWN), INPUTS[:1])
        assert result.clusters is not None
        assert result.clusters.ends == ((0, 2), (3, 6), (7, 9))
        assert result.clusters.counts[["ci_low", "ci_high", "share"]].isna().all(axis=None)
        assert result.clusters.between["share"].isna().all()
        assert any("one sequence" in note for note in result.notes)

    def test_what_makes_no_sense(self) -> None:
        with pytest.raises(UsageError, match="skip-first"):
            found(turning(KNOWN), skip_first=16)
        with pytest.raises(UsageError, match="classes"):
            found(turning(KNOWN), classes=1)

    def test_a_state_that_is_not_finite(self) -> None:
        model = Net([Adds(0, 1.0), Adds(1, 1.0)], 2)
        anatomy = opened(model, INPUTS)
        with torch.no_grad():
            model.blocks[1].bias[3] = torch.nan
        with pytest.raises(NonFiniteError, match=r"x_2 is not finite .*sequence 0, position 0"):
            phases(anatomy, corpus_of(INPUTS))

    def test_one_pass(self, monkeypatch: pytest.MonkeyPatch) -> None:
        anatomy, ran, seen = opened(turning(KNOWN), INPUTS), Stream.run, []

        def counted(self: Stream, entry: Entry, index: int, x: Tensor) -> Tensor:
            seen.extend([index] * len(x))
            return ran(self, entry, index, x)

        monkeypatch.setattr(Stream, "run", counted)
        phases(anatomy, corpus_of(INPUTS), DepthSettings(batch_size=5))
        assert sorted(seen) == sorted([*range(9)] * 12)


def reported(result: Phases, report: Report | None = None) -> Report:
    """A report with these phases, as it is after it was saved and read back."""
    return Report.from_json(replace(report or sample(), phases=result.plain()).to_json())


@pytest.fixture(scope="module")
def turned() -> Phases:
    return found(turning([0.02] * 4 + [0.9] + [0.02] * 4 + [0.9] + [0.02] * 2))


class TestReport:
    def test_plain_is_json(self, turned: Phases) -> None:
        plain = turned.plain()
        assert json.loads(json.dumps(plain, allow_nan=False)) == plain
        assert reported(turned).phases == plain
        assert plain["clusters"]["ends"] == [[0, 4], [5, 9], [10, 12]]
        assert [each["after"] for each in plain["boundaries"] if each["chosen"]] == [4, 9]
        assert set(plain["first"]) == set(turned.readable.first["target"])
        assert plain["sequences"] == 12
        alone = found(turning(KNOWN), INPUTS[:1]).plain()
        assert alone["clusters"]["ci_low"] is None
        json.dumps(alone, allow_nan=False)

    def test_the_finding(self, turned: Phases) -> None:
        said = finding(reported(turned))
        assert said is not None
        assert "lusters: x_0–x_4 | x_5–x_9 | x_10–x_12" in said.text
        assert "12 sequences, half of which score" in said.more
        assert finding(sample()) is None
        assert spans([[0, 0], [1, 24]]) == "x_0 | x_1–x_24"

    @pytest.mark.parametrize(
        ("state", "text"),
        [
            (0, "from x_0 already"),
            (5, "90 % of the best state's gain at x_5 (from x_3 to x_7 in resamples): blocks before still compute"),
            (12, "from x_12 alone, the last"),
            (None, "cannot be read from any state"),
        ],
    )
    def test_where_the_next_token_is_read(self, turned: Phases, state: int | None, text: str) -> None:
        plain = turned.plain()
        ends = {"ci_low": None, "ci_high": None} if state is None else {"ci_low": state - 2.0, "ci_high": state + 2.0}
        plain["first"]["next token"] = {"state": state, **ends, "best": 0.5, "baseline": 0.1}
        for train, few in ((127, True), (128, False)):  # the sample is 64 wide
            read = [{**row, "target": "next token", "train": train} for row in plain["readable"]]
            said = finding(replace(sample(), phases={**plain, "readable": read}))
            assert said is not None
            assert text in said.text
            assert ("one of the 15 most frequent" in said.text) == (state is not None)
            assert ("fitted on 127 positions: too few" in said.text) == few

    def test_no_clear_clusters_are_said(self) -> None:
        report = reported(found(turning([0.15] * 12)))
        said = finding(report)
        assert said is not None
        assert "o clear clusters" in said.text
        assert "No clear phases" in said.more

    def test_the_figure(self, turned: Phases, monkeypatch: pytest.MonkeyPatch) -> None:
        panel = PHASE_PANELS[0]
        monkeypatch.setitem(figures._BY_NAME, panel.name, panel)
        even_report = reported(found(turning([0.15] * 12)))
        short = reported(found(turning([0.5])), one_block())
        no_lens = reported(found(turning([0.02, 0.02, 0.9, 0.02, 0.02, 0.02])), headless())
        for report in (reported(turned), even_report, short, no_lens):
            assert panel.there(report)
            for theme in (LIGHT, DARK) if report is no_lens else (LIGHT,):
                image = np.asarray(Image.open(io.BytesIO(figures.render(report, panel.name, theme=theme))).convert("L"))
                edge = image[0, 0]
                assert (image[[0, -1]] == edge).all()
                assert (image[:, [0, -1]] == edge).all()
            assert "Curves over depth" in figures.alt_text(report, panel.name)
        assert not panel.there(sample())
        assert "<!-- no lens -->" in figures.render(no_lens, panel.name, "svg").decode()

    def test_shading_is_that_of_the_clusters(self, turned: Phases) -> None:
        from matplotlib.figure import Figure

        axes = list(Figure().subplots(2, 1))
        PHASE_PANELS[0].draw(reported(turned), axes, LIGHT)
        for ax in axes:
            shaded = [patch for patch in ax.patches if patch.get_width() > 0]
            assert [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in shaded] == [(4.5, 9.5)]
        assert [text.get_text().strip() for text in axes[0].texts] == ["100%", "100%"]


def test_a_shipped_model() -> None:
    """pre: the next token is read better at each state, the position is forgotten, and no cluster is clear."""
    _, corpus, anatomy = prepare(str(REPO / "data" / "checkpoints" / "pre"), tokens=2048, device="cpu")
    result = phases(anatomy, corpus, resamples=20)
    assert result.clusters is not None
    assert not result.clusters.clear
    table = result.readable.table
    by_target = {name: rows["accuracy"].to_numpy() for name, rows in table.groupby("target")}
    assert by_target["next token"][-1] > by_target["next token"][0] + 0.15
    assert by_target["position"][0] > 0.9 > 0.2 > by_target["position"][-1]
    assert by_target["current token"].min() > 0.8
    assert result.readable.first.set_index("target")["state"]["next token"] >= 7
