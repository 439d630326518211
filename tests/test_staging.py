"""Stages: the exact answers of analytic networks, the curve's arithmetic, the search, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from by_hand import corpus_of, opened, swept
from families import build, ids
from torch import Tensor, nn

from depthprobe.ablations.curve import save_staging, show_staging, staging_frame
from depthprobe.ablations.run import SweepSettings
from depthprobe.ablations.schedule import parse, partition
from depthprobe.ablations.staging import Staging, find_stages, stages_at
from depthprobe.corpus import Corpus
from depthprobe.errors import OutputError, UsageError
from depthprobe.estimate import Interval, Resampler

VOCAB, PART = 50, 8
INPUTS = ids(6, 16, vocab=VOCAB)
KAPPA = 1e-4  # stands for κ → 0: far above rounding, far below what any needed block costs


class Reads(nn.Module):
    """x + gain · tanh(W x[reads]) written to another part of the stream."""

    def __init__(self, seed: int, reads: int, writes: int, gain: float = 1.0) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(PART, PART, generator=draw) / PART**0.5)
        self.reads, self.writes, self.gain = reads, writes, gain

    def forward(self, x: Tensor) -> Tensor:
        read = x[..., PART * self.reads : PART * (self.reads + 1)]
        update = self.gain * torch.tanh(2 * read @ self.weight.T)
        before = PART * self.writes
        return x + nn.functional.pad(update, (before, x.shape[-1] - before - PART))


class Map(nn.Module):
    """A block without a skip: W tanh(x), W orthogonal."""

    def __init__(self, seed: int, width: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.linalg.qr(torch.randn(width, width, generator=draw))[0])

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(1.5 * x) @ self.weight.T


class Nothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * torch.tanh(x)


class Net(nn.Module):
    """Embedding, blocks, and a head that sees some parts of the stream only."""

    def __init__(self, blocks: Sequence[nn.Module], parts: int, seen: Sequence[int] | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(VOCAB, PART * parts)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(PART * parts, VOCAB, bias=False)
        with torch.no_grad():
            self.head.weight.mul_(6)
            for part in set(range(parts)) - set(range(parts) if seen is None else seen):
                self.head.weight[:, PART * part : PART * (part + 1)] = 0

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def parallel(count: int) -> Net:
    """Every branch reads what no branch writes."""
    return Net([Reads(i, 0, 1) for i in range(count)], 2)


def staged(stages: int, each: int) -> Net:
    """Branches of a stage read what the stage before alone wrote; the head sees the last one's part."""
    return Net([Reads(k * each + i, k, k + 1) for k in range(stages) for i in range(each)], stages + 1, [stages])


def chain(count: int, width: int = 2) -> Net:
    return Net([Map(i, width * PART) for i in range(count)], width)


def identity(count: int) -> Net:
    return Net([Nothing() for _ in range(count)], 2)


def found(model: nn.Module, inputs: Tensor = INPUTS, **options: object) -> Staging:
    return find_stages(opened(model, inputs), corpus_of(inputs), **options)


def depth(staging: Staging, kappa: float = KAPPA) -> float:
    points = sorted(staging.points, key=lambda point: point.stages)
    counts = np.array([point.stages for point in points], dtype=float)
    return float(stages_at(kappa, counts, np.array([[point.relative_kl.value for point in points]]))[0])


class TestExactAnswers:
    @pytest.mark.parametrize("count", [2, 5, 14])
    def test_every_branch_reads_x_0(self, count: int) -> None:
        staging = found(parallel(count))
        assert depth(staging) == pytest.approx(1, abs=0.01)
        one = next(point for point in staging.points if point.stages == 1)
        assert parse(one.schedule).stages == partition([range(count)]).stages
        assert all(point.kl.value <= 1e-6 for point in staging.points if point.stages >= 1)

    @pytest.mark.parametrize("count", [1, 3, 14])
    def test_blocks_that_do_nothing(self, count: int) -> None:
        staging = found(identity(count))
        assert depth(staging) == 0
        assert all(interval.value == interval.low == interval.high == 0 for interval in staging.depth.values())

    @pytest.mark.parametrize("count", [2, 5, 13])
    def test_a_chain_without_skips(self, count: int) -> None:
        assert depth(found(chain(count))) == pytest.approx(count, abs=0.01)

    @pytest.mark.parametrize(("stages", "each"), [(2, 2), (3, 2), (2, 3), (4, 1), (3, 5)])
    def test_stages_of_parallel_branches(self, stages: int, each: int) -> None:
        staging = found(staged(stages, each))
        assert depth(staging) == pytest.approx(stages, abs=0.01)
        at = next(point for point in staging.points if point.stages == stages)
        want = partition([range(k * each, (k + 1) * each) for k in range(stages)])
        assert parse(at.schedule).stages == want.stages

    @pytest.mark.parametrize("make", [lambda: parallel(3), lambda: chain(4), lambda: staged(2, 2)])
    @pytest.mark.parametrize("appended", [1, 9])
    def test_blocks_of_nothing_appended_change_nothing(self, make: Callable[[], Net], appended: int) -> None:
        before, model = found(make()), make()
        model.blocks.extend(Nothing() for _ in range(appended))
        after = found(model)
        assert after.units == before.units + appended
        assert depth(after) == pytest.approx(depth(before), abs=1e-3)

    @pytest.mark.parametrize("split", [0, 1, 3])
    def test_a_branch_in_two_halves_changes_nothing(self, split: int) -> None:
        before, model = found(staged(2, 2)), staged(2, 2)
        whole: Reads = model.blocks[split]
        halves = [Reads(split, whole.reads, whole.writes, 0.5) for _ in range(2)]
        model.blocks = nn.ModuleList([*model.blocks[:split], *halves, *model.blocks[split + 1 :]])
        with torch.no_grad():
            torch.testing.assert_close(model(INPUTS), staged(2, 2)(INPUTS))
        after = found(model)
        for kappa in (KAPPA, *after.depth):
            assert depth(after, kappa) == pytest.approx(depth(before, kappa), abs=2e-2 if kappa == KAPPA else 0.35)
        assert depth(after) == pytest.approx(2, abs=0.01)


class TestCurve:
    def at(self, kappa: float, counts: list[float], *rows: list[float]) -> list[float]:
        return stages_at(kappa, np.array(counts), np.array(rows)).tolist()

    def test_between_counts_the_line(self) -> None:
        assert self.at(0.1, [0, 1, 2, 3], [1.0, 0.3, 0.05, 0.0]) == pytest.approx([1 + 0.2 / 0.25])
        assert self.at(0.3, [0, 1, 2, 3], [1.0, 0.3, 0.05, 0.0]) == pytest.approx([1])
        assert self.at(0.5, [0, 1, 2, 3], [1.0, 0.3, 0.05, 0.0]) == pytest.approx([0.5 / 0.7])

    def test_a_row_each(self) -> None:
        assert self.at(0.1, [0, 2], [0.2, 0.0], [0.4, 0.0], [0.05, 0.0]) == pytest.approx([1.0, 1.5, 0.0])

    def test_fewer_stages_that_cost_less_serve_as_well(self) -> None:
        # Two stages cost more than one: one serves, and the line goes from one to three.
        assert self.at(0.1, [0, 1, 2, 3], [1.0, 0.2, 0.4, 0.0]) == pytest.approx([2.5])
        assert self.at(0.25, [0, 1, 2, 3], [1.0, 0.2, 0.4, 0.0]) == pytest.approx([0.75 / 0.8])
        assert self.at(0.1, [0, 1, 2, 3], [1.0, 0.05, 0.4, 0.0]) == pytest.approx([0.9 / 0.95])

    def test_ends(self) -> None:
        assert self.at(2.0, [0, 1, 2], [1.0, 0.3, 0.0]) == [0]
        assert self.at(0.0, [0, 1, 2], [1.0, 0.3, 0.0]) == [2]
        assert self.at(0.0, [0, 1, 2], [0.0, 0.0, 0.0]) == [0]

    def test_depth_is_read_off_the_points(self) -> None:
        staging = found(build("gpt2"), ids(8, 16))
        assert set(staging.depth) == {0.01, 0.03, 0.1}
        for kappa, interval in staging.depth.items():
            assert interval.value == pytest.approx(depth(staging, kappa))
            assert interval.low <= interval.value <= interval.high
            assert 0 <= interval.low < interval.high <= staging.units
        values = [staging.depth[kappa].value for kappa in sorted(staging.depth)]
        assert values == sorted(values, reverse=True)


class TestPoints:
    def test_points_go_from_the_whole_model_to_none(self) -> None:
        staging = found(build("llama"), ids(6, 16))
        assert [point.stages for point in staging.points] == [3, 2, 1, 0]
        assert staging.points[0].schedule == "0-2"
        assert staging.points[0].kl.value == 0
        assert staging.points[0].top1_agreement.value == 1
        assert staging.points[-1].schedule == ""
        for point in staging.points[:-1]:
            assert len(parse(point.schedule).stages) == point.stages

    def test_values_are_the_sweeps_on_the_half_that_scores(self) -> None:
        model, inputs = build("llama"), ids(6, 16)
        staging = found(model, inputs)
        made = [parse(point.schedule) for point in staging.points[:-1]]
        direct = swept(model, inputs[1::2], made)
        for place, point in enumerate(staging.points[:-1]):
            for name in ("kl", "delta_loss", "top1_agreement"):
                interval = getattr(point, name)
                assert interval.value == pytest.approx(direct.effects[name][:, place].mean(), rel=1e-6, abs=1e-9)
                assert interval.low <= interval.value <= interval.high
            assert point.relative_kl.value == pytest.approx(point.kl.value / staging.unigram_kl, rel=1e-6)

    def test_unigram_kl_by_hand(self) -> None:
        """The corpus's own unigram, every id counted once more than it occurs."""
        model, inputs = build("llama"), ids(6, 16)
        counts = torch.ones(96, dtype=torch.float64)
        for token in inputs.flatten().tolist():
            counts[token] += 1
        with torch.no_grad():
            p = model(inputs[1::2], use_cache=False).logits.double().log_softmax(-1)[:, :-1]
        want = (p.exp() * (p - (counts / counts.sum()).log())).sum(-1).mean()
        assert found(model, inputs).unigram_kl == pytest.approx(float(want), rel=1e-5)

    @pytest.mark.parametrize("combine", ["sum", "mean"])
    def test_combine_is_what_schedules_are_run_with(self, combine: str) -> None:
        model, inputs = build("gpt2"), ids(6, 16)
        staging = found(model, inputs, combine=combine)
        assert staging.combine == combine
        merged = [point for point in staging.points if "(" in point.schedule]
        assert merged
        direct = swept(model, inputs[1::2], [parse(point.schedule, combine) for point in merged])
        for place, point in enumerate(merged):
            assert point.kl.value == pytest.approx(direct.effects["kl"][:, place].mean(), rel=1e-6)

    def test_a_limit_ends_the_curve(self) -> None:
        staging = found(chain(6), limit=4)
        assert [point.stages for point in staging.points] == [6, 5, 4]
        assert all(interval.low >= 4 for interval in staging.depth.values()), "no line to a point that was not searched"
        assert [point.stages for point in found(chain(3), limit=3).points] == [3]
        assert [point.stages for point in found(chain(14), limit=0).points][-1] == 0

    def test_where_so_few_as_the_limit_will_do_it_is_a_bound(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Three stages are needed; a search that stops at four does not know."""
        staging = found(staged(3, 2), limit=4)
        for kappa, interval in staging.depth.items():
            assert staging.at_most(kappa)
            assert interval.value == 4
            assert np.isnan([interval.low, interval.high]).all()
        show_staging(staging)
        said = [line for line in capsys.readouterr().out.splitlines() if "keep the KL within" in line]
        assert len(said) == 3
        for line in said:
            assert line.startswith("at most 4 of 6 stages keep the KL within ")
            assert "[" not in line

    @pytest.mark.parametrize("options", [{}, {"limit": 0}, {"limit": 3}])
    def test_what_was_measured_is_no_bound(self, options: dict[str, int], capsys: pytest.CaptureFixture[str]) -> None:
        staging = found(chain(5), **options)
        assert not any(map(staging.at_most, staging.depth))
        assert all(interval.low <= interval.value <= interval.high for interval in staging.depth.values())
        show_staging(staging)
        assert "at most" not in capsys.readouterr().out

    def test_a_low_end_at_the_limit_is_a_bound(self, capsys: pytest.CaptureFixture[str]) -> None:
        staging = replace(found(chain(5), limit=3), depth={0.1: Interval(3.6, 3.0, 4.1)})
        show_staging(staging)
        assert capsys.readouterr().out.startswith(
            "3.6 of 5 stages keep the KL within 10% of the unigram's  [at most 3.0, 4.1]\n"
        )

    def test_score_positions_and_batches_change_no_count(self) -> None:
        model, inputs = build("gpt2"), ids(6, 24)
        whole = found(model, inputs, settings=SweepSettings(batch_size=6))
        small = found(model, inputs, settings=SweepSettings(batch_size=1))
        assert [point.schedule for point in small.points] == [point.schedule for point in whole.points]
        for a, b in zip(small.points, whole.points, strict=True):
            assert a.kl.value == pytest.approx(b.kl.value, rel=1e-4, abs=1e-8)
        part = found(model, inputs, settings=SweepSettings(score_positions=0.25))
        assert part.points[-1].kl.value != whole.points[-1].kl.value
        assert part.points[-1].kl.value == pytest.approx(whole.points[-1].kl.value, rel=0.5)


class TestSearch:
    def schedules(self, staging: Staging) -> list[str]:
        return [point.schedule for point in staging.points]

    def test_the_scoring_half_has_no_say(self) -> None:
        model, inputs = noisy(5), ids(8, 16, vocab=VOCAB)
        whole = found(model, inputs)
        for seed in (11, 12):
            other = inputs.clone()
            other[1::2] = ids(4, 16, seed, VOCAB)
            again = found(model, other)
            assert self.schedules(again) == self.schedules(whole)
            assert again.points[1].kl.value != whole.points[1].kl.value

    def test_the_choosing_half_has_one(self) -> None:
        model, inputs = noisy(5), ids(8, 16, vocab=VOCAB)
        whole, made = found(model, inputs), set()
        for seed in range(11, 15):
            other = inputs.clone()
            other[0::2] = ids(4, 16, seed, VOCAB)
            made.add(tuple(self.schedules(found(model, other))))
        assert made - {tuple(self.schedules(whole))}

    @pytest.mark.parametrize("blocks", [1, 2, 3, 5])
    def test_exhaustive_is_brute_force(self, blocks: int) -> None:
        """Of all splits into contiguous stages, with any blocks dropped: none is cheaper on the half that chooses."""
        model, inputs = noisy(blocks), ids(6, 16, vocab=VOCAB)
        staging = found(model, inputs)
        every = list(contiguous(blocks))
        assert len(every) == (3**blocks - 1) // 2
        costs = swept(model, inputs[0::2], [partition(groups) for groups in every]).effects["kl"].mean(axis=0)
        for point in staging.points[:-1]:
            mine = swept(model, inputs[0::2], [parse(point.schedule)]).effects["kl"].mean()
            fewest = min(cost for groups, cost in zip(every, costs, strict=True) if len(groups) == point.stages)
            assert mine == pytest.approx(fewest, rel=1e-5, abs=1e-9)
        assert "every partition" in staging.searched

    def test_greedy_alone_is_near_the_best(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, inputs = noisy(7), ids(8, 16, vocab=VOCAB)
        best = found(model, inputs)
        monkeypatch.setattr("depthprobe.ablations.staging.EXHAUSTIVE", 0)
        greedy = found(model, inputs)
        assert "every partition" not in greedy.searched
        assert greedy.evaluations < best.evaluations
        assert len(greedy.points) == len(best.points)
        for kappa, interval in greedy.depth.items():
            assert interval.value == pytest.approx(best.depth[kappa].value, abs=1.0)

    def test_blocks_that_hurt_are_dropped(self) -> None:
        """The middle blocks cancel: without both of them the model is the same."""
        blocks = [Reads(0, 0, 1), Reads(5, 0, 1), Reads(5, 0, 1, -1.0), Reads(3, 1, 2)]
        staging = found(Net(blocks, 3, [2]))
        at = next(point for point in staging.points if point.stages == 2)
        assert at.kl.value <= 1e-6
        assert depth(staging) == pytest.approx(2, abs=0.01)

    def test_progress_ends_at_its_total(self) -> None:
        for blocks, limit in ((5, 1), (14, 1), (14, 6)):
            seen: list[tuple[int, int]] = []
            found(chain(blocks), limit=limit, progress=lambda done, total, seen=seen: seen.append((done, total)))
            assert {total for _, total in seen} == {blocks - limit + 1}
            done = [d for d, _ in seen]
            assert done == sorted(done)
            assert done[-1] == blocks - limit + 1

    @pytest.mark.parametrize("seed", [0, 50])
    def test_thirty_blocks_cost_at_most_260_forward_passes(self, seed: int) -> None:
        """Counted where blocks really run, on both halves."""
        model, inputs = noisy(30, seed), ids(2, 8, vocab=VOCAB)
        anatomy, runs = opened(model, inputs), [0]

        def hook(*_: object) -> None:
            runs[0] += 1

        # The activation runs only where a block does: a bypassed one never reaches it.
        for block in model.blocks:
            block.inner.register_forward_hook(hook)
        staging = find_stages(anatomy, corpus_of(inputs))
        assert runs[0] == staging.evaluations
        assert len(staging.points) == 31
        assert staging.evaluations / 30 <= 260


class Noisy(nn.Module):
    """A residual block with an inner module that can be watched, of a size of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.a, self.b = (nn.Parameter(torch.randn(16, 16, generator=draw) / 4) for _ in range(2))
        self.gain = float(torch.rand(1, generator=draw))
        self.inner = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.inner(x @ self.b.T) @ self.a.T


def noisy(blocks: int, seed: int = 0) -> Net:
    return Net([Noisy(seed + i) for i in range(blocks)], 2)


def contiguous(blocks: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to keep some blocks and to cut what is kept into runs."""
    for size in range(1, blocks + 1):
        for kept in combinations(range(blocks), size):
            for cuts in range(size):
                for places in combinations(range(1, size), cuts):
                    edges = [0, *places, size]
                    yield tuple(kept[a:b] for a, b in pairwise(edges))


class TestRefused:
    def test_no_head(self) -> None:
        for model in (build("bert", headless=True), build("bert"), build("gpt2", headless=True)):
            with pytest.raises(UsageError, match="no next-token head"):
                found(model, ids(4, 16))

    def test_one_sequence(self) -> None:
        with pytest.raises(UsageError, match="at least 2 sequences"):
            found(chain(3), ids(1, 16, vocab=VOCAB))

    @pytest.mark.parametrize("limit", [-1, 4])
    def test_a_limit_that_is_none(self, limit: int) -> None:
        with pytest.raises(UsageError, match=f"--limit {limit}; expected 0 to 3"):
            found(chain(3), limit=limit)

    @pytest.mark.parametrize("combine", ["branch-sum", "median"])
    def test_a_combination_that_blocks_do_not_have(self, combine: str) -> None:
        with pytest.raises(UsageError):
            found(chain(3), combine=combine)


class TestTable:
    def test_frame_file_and_screen(self, tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
        staging = found(build("gpt2"), ids(6, 16))
        frame = staging_frame(staging)
        assert list(frame.columns)[:4] == ["stages", "schedule", "combine", "relative_kl"]
        assert len(frame) == len(staging.points)
        path = save_staging(staging, tmp_path / "made")
        saved = pd.read_csv(path, keep_default_na=False)
        pd.testing.assert_frame_equal(saved, frame, check_exact=False, check_dtype=False)
        assert [entry.name for entry in path.parent.iterdir()] == ["stages.csv"]
        show_staging(staging)
        out = capsys.readouterr().out
        assert out.count("of 3 stages keep the KL within") == 3
        assert "greedy" in out

    def test_a_folder_that_is_a_file(self, tmp_path) -> None:
        (tmp_path / "taken").write_text("")
        with pytest.raises(OutputError, match="taken"):
            save_staging(found(chain(2)), tmp_path / "taken")


class TestHalves:
    """Where there are several documents, each is in one half alone."""

    def corpus(self, inputs: Tensor, owners: list[int]) -> Corpus:
        return Corpus(inputs, np.array(owners), "ids", "0" * 64, "none")

    def test_no_document_chooses_and_scores(self) -> None:
        model, inputs = noisy(4), ids(8, 16, vocab=VOCAB)
        staging = find_stages(opened(model, inputs), self.corpus(inputs, [0, 0, 0, 1, 1, 2, 2, 3]))
        assert staging.sequences == 4
        made = [parse(point.schedule) for point in staging.points[:-1]]
        direct = swept(model, inputs[3:7], made).effects["kl"]
        draws = Resampler(4, np.array([1, 1, 2, 2]))
        for place, (point, *ends) in enumerate(zip(staging.points, *draws.intervals(direct), strict=False)):
            assert (point.kl.value, point.kl.low, point.kl.high) == pytest.approx(ends, rel=1e-5, abs=1e-9), place
        every = list(contiguous(4))
        costs = swept(model, inputs[[0, 1, 2, 7]], [partition(groups) for groups in every]).effects["kl"].mean(axis=0)
        for point, schedule in zip(staging.points[:-1], made, strict=True):
            mine = swept(model, inputs[[0, 1, 2, 7]], [schedule]).effects["kl"].mean()
            fewest = min(cost for groups, cost in zip(every, costs, strict=True) if len(groups) == point.stages)
            assert mine == pytest.approx(fewest, rel=1e-5, abs=1e-9)

    def test_documents_are_resampled_together(self) -> None:
        """Two documents score, the same sequences as where none is known: the values stay, the intervals do not."""
        model, inputs = noisy(4), ids(8, 16, vocab=VOCAB)
        alone = find_stages(opened(model, inputs), corpus_of(inputs))
        grouped = find_stages(opened(model, inputs), self.corpus(inputs, [0, 1, 0, 1, 2, 3, 2, 3]))
        assert [p.kl.value for p in grouped.points] == [p.kl.value for p in alone.points]
        assert [p.kl.low for p in grouped.points[1:]] != [p.kl.low for p in alone.points[1:]]

    def test_of_one_document_every_second_sequence_chooses(self) -> None:
        model, inputs = noisy(4), ids(7, 16, vocab=VOCAB)
        alone = find_stages(opened(model, inputs), corpus_of(inputs))
        one = find_stages(opened(model, inputs), self.corpus(inputs, [5] * 7))
        pd.testing.assert_frame_equal(staging_frame(one), staging_frame(alone), check_exact=True)
        assert one.depth == alone.depth
