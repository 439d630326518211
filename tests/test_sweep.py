"""The shared sweep: what must cost nothing, what is counted, what results must not depend on, and memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import corpus_of, deep, opened, swept
from families import build, ids
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from depthprobe.ablations.effects import Reference, Scored, _Unmodified, state_distance
from depthprobe.ablations.kinds import KINDS, controls, schedules
from depthprobe.ablations.run import SweepSettings, sweep
from depthprobe.ablations.schedule import (
    Schedule,
    attention_first,
    merge,
    parse,
    shuffle,
    skip,
    swap,
    unmodified,
)
from depthprobe.ablations.sweep import Trie, planned_evaluations
from depthprobe.errors import NonFiniteError

VOCAB, WIDTH = 50, 16


class Block(nn.Module):
    """x + gain · A g(B x)."""

    def __init__(self, a: Tensor, b: Tensor, gain: float = 1.0, act: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.a, self.b, self.gain, self.act = nn.Parameter(a), nn.Parameter(b), gain, act

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * (self.act(x @ self.b.T) @ self.a.T)


class Unchanged(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Net(nn.Module):
    """A language model: embedding, blocks, head."""

    def __init__(self, blocks: list[nn.Module], bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, VOCAB, bias=bias)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def matrix(seed: int, size: float = 1.0) -> Tensor:
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed)) * size / WIDTH**0.5


def tanh_block(seed: int, gain: float = 1.0) -> Block:
    return Block(matrix(seed), matrix(100 + seed), gain)


INPUTS = ids(3, 24, vocab=VOCAB)


class TestNothingCosts:
    def test_a_merge_of_blocks_that_do_not_read_each_other(self) -> None:
        """Blocks 1 to 3 read the first half of the stream and write the second."""
        reads, writes = torch.eye(WIDTH), torch.eye(WIDTH)
        reads[WIDTH // 2 :], writes[: WIDTH // 2] = 0, 0
        beside = [Block(writes @ matrix(i), matrix(i + 10) @ reads) for i in (1, 2, 3)]
        net = Net([tanh_block(0), *beside, tanh_block(4)])
        free = [merge(5, [1, 2]), merge(5, [2, 3]), merge(5, [1, 2, 3]), merge(5, [1, 3]), swap(5, 1, 3)]
        dear = [merge(5, [0, 1]), merge(5, [3, 4]), merge(5, [1, 2], "mean"), skip(5, [2])]
        found = swept(net, INPUTS, free + dear)
        assert found.effects["kl"][:, : len(free)].max() <= 1e-6
        assert np.abs(found.effects["delta_loss"][:, : len(free)]).max() <= 1e-6
        assert found.effects["top1_agreement"][:, : len(free)].min() == 1
        assert found.effects["kl"][:, len(free) :].min() > 1e-3

    def test_a_swap_of_linear_blocks_that_commute(self) -> None:
        base = matrix(5, 0.5)
        linear = [Block(power, torch.eye(WIDTH), act=lambda x: x) for power in (base, base @ base - base, base @ base)]
        net = Net([tanh_block(0), *linear, tanh_block(4)])
        free = [swap(5, 1, 2), swap(5, 1, 3), parse("0 3 2 1 4"), parse("0 3 1 2 4")]
        dear = [swap(5, 0, 1), swap(5, 3, 4), merge(5, [1, 2])]
        found = swept(net, INPUTS, free + dear)
        assert found.effects["kl"][:, : len(free)].max() <= 1e-6
        assert np.abs(found.effects["delta_loss"][:, : len(free)]).max() <= 1e-6
        assert found.effects["kl"][:, len(free) :].min() > 1e-3

    def test_a_skip_of_a_block_that_does_nothing(self) -> None:
        silent = Block(torch.zeros(WIDTH, WIDTH), matrix(7))
        net = Net([tanh_block(0), Unchanged(), tanh_block(2), silent])
        free = [skip(4, [1]), skip(4, [3]), skip(4, [1, 3]), parse("0 1 1 2 3 3"), merge(4, [0, 1]), swap(4, 1, 2)]
        found = swept(net, INPUTS, [*free, skip(4, [0])])
        assert found.effects["kl"][:, :-1].max() <= 1e-6
        assert np.abs(found.effects["delta_loss"][:, :-1]).max() <= 1e-6
        assert found.effects["state_distance"][:, :-1].max() <= 1e-6
        assert found.effects["kl"][:, -1].min() > 1e-3

    def test_the_unmodified_schedule_costs_exactly_nothing(self) -> None:
        found = swept(Net([tanh_block(i) for i in range(3)]), INPUTS, [unmodified(3), parse("0-2")])
        assert not found.effects["kl"].any()
        assert not found.effects["delta_loss"].any()
        assert not found.effects["state_distance"].any()
        assert (found.effects["top1_agreement"] == 1).all()


class TestEffects:
    def test_the_loss_is_the_models_own(self) -> None:
        net = Net([tanh_block(i) for i in range(3)])
        found = swept(net, INPUTS, [skip(3, [1])])
        with torch.no_grad():
            logits = net(INPUTS).double()
        want = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), INPUTS[:, 1:], reduction="none").mean(dim=1)
        np.testing.assert_allclose(found.base_loss, want, rtol=1e-6)

    @pytest.mark.parametrize("gain", [1.0, 1e-2, 1e-3, 1e-4, 1e-5])
    @pytest.mark.parametrize("common", [0.0, 5.0])
    def test_kl_is_precise_for_tiny_changes(self, gain: float, common: float) -> None:
        """Against float64. With `common`, all logits move alike besides, which changes no prediction."""
        reference, scored, last, change = self._tiny()
        changed = (last.double() + gain * change.double()).float()
        changed[..., 0] += common
        found = reference.compare(changed)
        p, q = (reference.stream(x.double()).log_softmax(-1)[:, :-1] for x in (last, changed))
        kl = (p.exp() * (p - q)).sum(-1).mean(dim=1).numpy()
        loss = (p - q).gather(-1, scored.targets[..., None])[..., 0].mean(dim=1).numpy()
        assert kl.min() > 0
        np.testing.assert_allclose(found["kl"], kl, rtol=0.02, atol=1e-14)
        np.testing.assert_allclose(found["delta_loss"], loss, rtol=1e-3, atol=3e-7)

    @pytest.mark.parametrize("gain", [0.0, 1e-8, 1e-7, 1e-6, 1e-2, 1.0, 30.0, 1e4])
    def test_kl_is_never_negative_and_always_finite(self, gain: float) -> None:
        reference, _, last, change = self._tiny()
        found = reference.compare(last + gain * change)
        for name, values in found.items():
            assert np.isfinite(values).all(), name
        assert found["kl"].min() >= 0
        assert 0 <= found["top1_agreement"].min() <= found["top1_agreement"].max() <= 1

    def test_kl_where_a_token_rises_from_no_probability_at_all(self) -> None:
        """Its share of log Σ p e^c has no room in float32, whether e^c still has or not."""
        before = torch.tensor([[[0.0, -200.0, 1.0], [0.0, -95.0, 1.0], [0.0, -60.0, 1.0], [0.0, -200.0, 1.0]]])
        after = torch.tensor([[[0.0, 2.0, 1.0], [0.0, -9.0, 1.0], [0.0, 2.0, 1.0], [0.0, -120.0, 1.0]]])
        p, q = (logits.double().log_softmax(-1) for logits in (before, after))
        found = _Unmodified.of(before, torch.tensor([[0, 1, 2, 1]])).effects(after, torch.empty_like(after))
        np.testing.assert_allclose(found["kl"], (p.exp() * (p - q)).sum(-1), rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(found["delta_loss"], (p - q)[0, range(4), [0, 1, 2, 1]][None], rtol=1e-5)
        assert found["top1_agreement"].tolist() == [[0, 1, 0, 1]]

    def _tiny(self) -> tuple[Reference, Scored, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(3)
        head = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64) / 2
        head[:, 0] = 1.0  # the first dimension moves all logits alike
        last = torch.randn(3, 24, WIDTH, generator=generator)
        change = torch.randn(3, 24, WIDTH, generator=generator)

        class Head:
            def __call__(self, x: Tensor) -> Tensor:
                return x @ head.to(x.dtype).T

            def readout(self, x: Tensor, inputs: Tensor) -> Tensor:
                # float64 inside, as a stand-in for a head without rounding of its own
                return self(x.double()).float()

        scored = Scored.next_token(INPUTS, np.arange(3), 1.0, 0)
        return Reference(Head(), last, scored, chunk=1000), scored, last, change

    def test_readout_in_chunks_is_the_same(self) -> None:
        reference, scored, last, change = self._tiny()
        whole = reference.compare(last + change)
        for chunk in (1, 5, 24, 50):
            pieces = Reference(reference.stream, last, scored, chunk=chunk).compare(last + change)
            for name in whole:
                np.testing.assert_allclose(pieces[name], whole[name], rtol=1e-6)

    def test_state_distance(self) -> None:
        a, b = torch.randn(3, 7, 16), torch.randn(3, 7, 16)
        want = [np.mean([1 - _cos(a[i, t], b[i, t]) for t in range(7)]) for i in range(3)]
        np.testing.assert_allclose(state_distance(a, b), want, rtol=1e-5)
        assert not state_distance(a, a).any()
        np.testing.assert_allclose(state_distance(a, -a), 2, rtol=1e-6)
        np.testing.assert_allclose(state_distance(3 * a, a), 0, atol=1e-7)
        # 1 - cos of a small angle is half its square: nothing of it may be lost to cancellation.
        across = torch.zeros(1, 1, 16)
        across[..., 0], off = 1, across.clone()
        off[..., 0], off[..., 1] = 1, 1e-5
        np.testing.assert_allclose(state_distance(off, across), 5e-11, rtol=1e-3)

    def test_infinite_effects_are_an_error_that_names_the_schedule(self) -> None:
        net = Net([tanh_block(0), Block(matrix(1), torch.eye(WIDTH), act=lambda x: (30 * x) ** 9), tanh_block(2)])
        with pytest.raises(NonFiniteError, match="schedule 0-1 1 1 1 2 is") as caught:
            swept(net, INPUTS, [skip(3, [0]), parse("0 1 1 1 1 2")])
        assert "\n" not in str(caught.value)


def _cos(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    return float(a @ b / (a.norm() * b.norm()))


class TestCounts:
    """The inner attention runs when a block really runs; a bypassed block does not reach it."""

    def _count(self, blocks: int, made: list[Schedule]) -> tuple[int, Any]:
        model = deep("llama", blocks)
        anatomy = opened(model, INPUTS)
        runs = [0]

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            runs[0] += 1

        handles = [block.self_attn.register_forward_hook(hook) for block in model.model.layers]
        found = sweep(anatomy, corpus_of(INPUTS), made, SweepSettings(batch_size=len(INPUTS)))
        for handle in handles:
            handle.remove()
        return runs[0], found

    @pytest.mark.parametrize(
        "made",
        [
            [unmodified(6)],
            schedules(6, ("skip",)),
            schedules(6, ("skip", "merge")),
            schedules(6, KINDS, span=3),
            controls(6),
            schedules(6, ("skip", "merge", "swap")) + controls(6),
            schedules(6, ("merge",), combine="weights") + schedules(6, ("merge",), combine="mean"),
            schedules(6, ("skip", "merge"), unit="attention") + schedules(6, ("skip", "merge"), unit="mlp"),
            [attention_first(6, [i, i + 1]) for i in range(5)],
            [parse("5 4 3 2 1 0"), parse("0"), parse("3"), parse("0 0 0"), parse("(0+5) (1+4)")],
        ],
    )
    def test_made_are_as_planned_and_as_the_tries_shape_says(self, made: list[Schedule]) -> None:
        runs, found = self._count(6, made)
        planned, plain = planned_evaluations(made, 6)
        assert runs == found.evaluations == planned == Trie.of([unmodified(6), *made]).evaluations()
        assert found.plain_evaluations == plain
        assert plain == sum(len(stage) for schedule in made for stage in schedule.stages)

    def test_branch_sums_are_counted_too(self) -> None:
        made = [parse("0 (1a+2a) (1m+2m)", "branch-sum"), parse("0 (1a+2a) (1m+2m)")]
        model = build("bert")
        anatomy, runs = opened(model, INPUTS), [0]

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            runs[0] += 1

        for layer in model.bert.encoder.layer:
            layer.attention.self.register_forward_hook(hook)
        found = sweep(anatomy, corpus_of(INPUTS), made, SweepSettings(batch_size=3))
        assert runs[0] == found.evaluations == planned_evaluations(made, 3)[0]

    @pytest.mark.parametrize("blocks", [4, 12, 30])
    def test_skips_and_adjacent_merges_take_half(self, blocks: int) -> None:
        made = schedules(blocks, ("skip", "merge"))
        assert len(made) == 2 * blocks - 1
        planned, plain = planned_evaluations(made, blocks)
        # The unmodified run, then what follows each skip and each merge; the first step of a merge is its own skip's.
        assert planned == blocks + sum(range(blocks)) + sum(range(blocks - 1)) == blocks + (blocks - 1) ** 2
        assert plain == blocks * (blocks - 1) * 2
        if blocks == 30:
            assert planned < 0.505 * plain

    def test_a_schedule_twice_costs_once(self) -> None:
        made = [skip(6, [2]), parse("0-1 3-5")]
        runs, found = self._count(6, made)
        assert runs == planned_evaluations(made[:1], 6)[0]
        np.testing.assert_array_equal(found.effects["kl"][:, 0], found.effects["kl"][:, 1])


class TestScorePositions:
    def test_a_subset_is_keyed_by_seed_and_sequence(self) -> None:
        inputs = ids(5, 40)
        numbers = np.arange(5)
        whole = Scored.next_token(inputs, numbers, 0.25, 7).positions
        assert whole.shape == (5, 10)
        assert all(len(set(row.tolist())) == 10 for row in whole)
        assert whole.max() < 39
        assert whole.min() >= 0
        assert len({tuple(row.tolist()) for row in whole}) == 5, "every sequence has its own"
        part = Scored.next_token(inputs[3:], numbers[3:], 0.25, 7).positions
        assert torch.equal(part, whole[3:])
        assert not torch.equal(Scored.next_token(inputs, numbers, 0.25, 8).positions, whole)

    def test_targets_are_what_follows(self) -> None:
        inputs = ids(4, 40)
        scored = Scored.next_token(inputs, np.arange(4), 0.3, 0)
        for row in range(4):
            for place, position in enumerate(scored.positions[row].tolist()):
                assert scored.targets[row, place] == inputs[row, position + 1]
                assert scored.ids[row, place] == inputs[row, position]

    def test_every_position_is_equally_likely(self) -> None:
        inputs = torch.zeros(1, 21, dtype=torch.long).expand(4000, -1)
        drawn = Scored.next_token(inputs, np.arange(4000), 0.25, 0).positions
        counts = np.bincount(drawn.flatten().numpy(), minlength=20)
        assert len(counts) == 20
        assert np.abs(counts - 1000).max() < 5 * np.sqrt(1000 * 0.75)

    def test_all_of_them_is_every_predicted_position(self) -> None:
        assert torch.equal(Scored.next_token(ids(2, 9), np.arange(2), 1.0, 0).positions, torch.arange(8).expand(2, -1))
        assert Scored.next_token(ids(2, 9), np.arange(2), 0.001, 0).positions.shape == (2, 1)

    def test_effects_are_means_over_the_subset(self) -> None:
        net, inputs, made = Net([tanh_block(i) for i in range(3)]), ids(6, 40, vocab=VOCAB), [skip(3, [1])]
        found = swept(net, inputs, made, score_positions=0.25, seed=4)
        positions = Scored.next_token(inputs, np.arange(6), 0.25, 4).positions
        with torch.no_grad():
            x = net.embed(inputs)
            p = net(inputs).double().log_softmax(-1)
            q = net.head(net.blocks[2](net.blocks[0](x))).double().log_softmax(-1)
        kl = (p.exp() * (p - q)).sum(-1).gather(1, positions).mean(dim=1)
        np.testing.assert_allclose(found.effects["kl"][:, 0], kl, rtol=1e-4)


class TestIndependence:
    MADE = schedules(5, KINDS) + controls(5) + schedules(5, ("skip", "merge"), unit="mlp")

    @pytest.mark.parametrize("name", ["llama", "gemma3", "bert"])
    def test_of_the_batch_size(self, name: str) -> None:
        model, inputs = deep(name, 5), ids(5, 24)
        runs = [swept(model, inputs, self.MADE, batch_size=size, score_positions=0.5) for size in (5, 1, 3)]
        for metric, values in runs[0].effects.items():
            for other in runs[1:]:
                scale = np.maximum(1, np.abs(values))
                off = np.abs(other.effects[metric] - values) / scale
                assert off.max() <= (0.09 if metric == "top1_agreement" else 1e-5), metric
                assert np.median(off) <= 1e-6, metric

    def test_of_what_else_runs(self) -> None:
        model, inputs = deep("llama", 5), ids(4, 24)
        together = swept(model, inputs, self.MADE, batch_size=4)
        chosen = np.random.default_rng(0).permutation(len(self.MADE))[:20]
        for place in chosen:
            alone = swept(model, inputs, [self.MADE[place]], batch_size=4)
            for metric, values in alone.effects.items():
                np.testing.assert_array_equal(values[:, 0], together.effects[metric][:, place], err_msg=metric)

    def test_of_their_order(self) -> None:
        model, inputs = deep("llama", 5), ids(4, 24)
        one, other = (swept(model, inputs, made, batch_size=4) for made in (self.MADE, self.MADE[::-1]))
        for metric, values in one.effects.items():
            np.testing.assert_array_equal(values, other.effects[metric][:, ::-1])

    def test_of_the_memory_allowed(self) -> None:
        model, inputs = deep("llama", 5), ids(6, 24)
        anatomy, corpus = opened(model, inputs), corpus_of(inputs)
        settings = SweepSettings(memory=150_000)
        assert settings.sequences_at_once(anatomy, corpus) < SweepSettings().sequences_at_once(anatomy, corpus)
        one, other = (sweep(anatomy, corpus, self.MADE, s) for s in (settings, SweepSettings()))
        for metric in ("kl", "delta_loss", "state_distance"):
            np.testing.assert_allclose(one.effects[metric], other.effects[metric], atol=1e-5, rtol=1e-5)
        assert one.notes == other.notes == []
        tight = sweep(anatomy, corpus, self.MADE[:1], SweepSettings(memory=5_000))
        assert "more than --memory allows" in tight.notes[0]


class Alive(TorchDispatchMode):
    """How many storages of at least a state's size are alive at once, of those made inside."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.alive, self.peak = size, {}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else [found]:
            if isinstance(tensor, Tensor) and tensor.numel() >= self.size:
                self.alive[id(tensor)] = weakref.ref(tensor)
        places = set()
        for key, reference in list(self.alive.items()):
            tensor = reference()
            if tensor is None:
                del self.alive[key]
            else:
                places.add(tensor.untyped_storage().data_ptr())
        self.peak = max(self.peak, len(places))
        return found


class TestMemory:
    BLOCKS = 8

    def _peak(self, made: list[Schedule]) -> int:
        net = Net([tanh_block(i, 0.2) for i in range(self.BLOCKS)])
        inputs = ids(2, 16, vocab=VOCAB)
        anatomy = opened(net, inputs)
        gc.collect()
        with Alive(inputs.numel() * WIDTH) as alive:
            found = sweep(anatomy, corpus_of(inputs), made, SweepSettings(batch_size=2))
        assert len(found.effects["kl"][0]) == len(made)
        return alive.peak

    def test_does_not_grow_with_the_number_of_schedules(self) -> None:
        """The default kinds need the unmodified states and a few beside them, as a single skip does."""
        few = self._peak([skip(self.BLOCKS, [0])])
        default = self._peak(schedules(self.BLOCKS) + controls(self.BLOCKS))
        assert few <= 2 * self.BLOCKS + 12
        assert default <= few + 6

    def test_many_unlike_schedules_stay_within_a_bound_of_the_depth(self) -> None:
        """At most a state for each unit that may run next, at each step of one path, beside the unmodified states."""
        subsets = [skip(self.BLOCKS, gone) for k in (1, 2, 3) for gone in combinations(range(self.BLOCKS), k)]
        mixed = [shuffle(self.BLOCKS, 0, self.BLOCKS, seed) for seed in range(240)]
        peaks = [self._peak(made) for made in (mixed[:60], mixed, subsets)]
        assert max(peaks) <= self.BLOCKS * (self.BLOCKS + 1) // 2 + self.BLOCKS + 12, peaks
        assert peaks[1] <= peaks[0] + 6, "four times the schedules"
