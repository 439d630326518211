"""Ridge classifiers on states: against scikit-learn's, and on networks in which it is known what is where."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from by_hand import corpus_of, opened
from families import build, ids
from sklearn.linear_model import RidgeClassifier
from torch import Tensor, nn

from depthprobe.corpus import Corpus, halves
from depthprobe.depth.base import DepthSettings
from depthprobe.depth.readable import Kept, Readable, readable
from depthprobe.depth.ridge import PENALTIES, Ridge, best_penalty
from depthprobe.errors import NonFiniteError, UsageError

WIDTH, LENGTH = 48, 24
BITS, ANSWER, PLACE = slice(0, 2), 2, slice(8, 8 + LENGTH)  # where in the stream what is written


class Nothing(nn.Module):
    """Turns two parts that hold nothing: a block that does nothing at all would be no block."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1e-3 * x.roll(1, dims=-1) * (torch.arange(WIDTH) >= 40)


class Xor(Nothing):
    """Writes the exclusive or of a token's two bits, which no straight line reads from them."""

    def forward(self, x: Tensor) -> Tensor:
        written = torch.zeros_like(x)
        written[..., ANSWER] = x[..., 0].sign() * x[..., 1].sign()
        return super().forward(x) + written


class Place(Nothing):
    """Writes the position."""

    def forward(self, x: Tensor) -> Tensor:
        written = torch.zeros_like(x)
        written[..., PLACE] = torch.eye(LENGTH)[: x.shape[1]]
        return super().forward(x) + written


class Forget(Nothing):
    """Takes the token out of the stream."""

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.ones(WIDTH)
        kept[0:2] = 0
        return super().forward(x) * kept


class Bits(nn.Module):
    """Tokens 0 … 3 are two bits, 4 and 5 are answers: 0 and something of their own in the bits."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 6, bias=False)
        with torch.no_grad():
            self.embed.weight.zero_()
            self.embed.weight[:, BITS] = torch.tensor([[1, 1], [1, -1], [-1, 1], [-1, -1], [0, 3], [3, 0]]).float()
            self.embed.weight[:, -1] = 0.1

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def questions(sequences: int = 40, seed: int = 0) -> Tensor:
    """A question, its answer, a question, its answer …"""
    asked = torch.randint(0, 4, (sequences, LENGTH // 2), generator=torch.Generator().manual_seed(seed))
    answers = torch.tensor([4, 5, 5, 4])[asked]
    return torch.stack([asked, answers], dim=2).flatten(1)


def read(model: nn.Module, inputs: Tensor, corpus: Corpus | None = None, **options: object) -> Readable:
    settings = DepthSettings(**{k: options.pop(k) for k in ("seed", "batch_size", "memory") if k in options})
    corpus = corpus or corpus_of(inputs)
    return readable(opened(model, inputs), corpus, settings, **options)


def accuracy(found: Readable, target: str) -> np.ndarray:
    return found.table[found.table["target"] == target]["accuracy"].to_numpy()


def first(found: Readable, target: str) -> float:
    return float(found.first.set_index("target")["state"][target])


class TestRidge:
    @pytest.mark.parametrize(("positions", "width"), [(200, 12), (40, 90)])
    @pytest.mark.parametrize("count", [2, 5])
    def test_is_that_of_scikit_learn(self, positions: int, width: int, count: int) -> None:
        rng = np.random.default_rng(3)
        labels = rng.integers(0, count, positions)
        x = (rng.normal(size=(positions, width)) * 5 + labels[:, None] + 40).astype(np.float32)
        others = (rng.normal(size=(60, width)) * 5 + 42).astype(np.float32)
        mean, spread = x.astype(float).mean(axis=0), x.astype(float).std(axis=0)
        for penalty in (0.01, 1.0):
            plain = RidgeClassifier(alpha=penalty * positions).fit((x - mean) / spread, labels)
            want = plain.decision_function((others - mean) / spread)
            got = Ridge(x).scores(labels, count, others, [penalty])[0]
            signed = 2 * got - 1  # scikit-learn's labels are −1 and 1
            np.testing.assert_allclose(signed[:, 1] if count == 2 else signed, want, atol=1e-6)
            np.testing.assert_allclose(got.sum(axis=1), 1)

    def test_a_dimension_that_does_not_vary_is_left_out(self) -> None:
        rng = np.random.default_rng(0)
        x = rng.normal(size=(50, 4)).astype(np.float32)
        labels = (x[:, 0] > 0).astype(int)
        constant = np.concatenate([x, np.full((50, 1), 1e4, dtype=np.float32)], axis=1)
        for got, want in zip(
            Ridge(constant).scores(labels, 2, constant, [0.1]), Ridge(x).scores(labels, 2, x, [0.1]), strict=True
        ):
            np.testing.assert_allclose(got, want, atol=1e-9)

    def test_features_of_one_value_give_the_shares(self) -> None:
        x = np.ones((10, 3), dtype=np.float32)
        labels = np.array([0] * 7 + [1] * 3)
        np.testing.assert_allclose(Ridge(x).scores(labels, 2, x, [1.0])[0], np.tile([0.7, 0.3], (10, 1)))

    def test_the_penalty_is_large_where_there_is_nothing_to_read(self) -> None:
        rng = np.random.default_rng(1)
        x, y = (rng.normal(size=(60, 50)).astype(np.float32) for _ in range(2))
        noise = np.array([0] * 45 + [1] * 15)
        assert best_penalty([(Ridge(x), noise, y, noise)], 2) >= 1
        told = np.concatenate([x[:, :1] + 3 * noise[:, None], y[:, 1:]], axis=1)
        again = np.concatenate([y[:, :1] + 3 * noise[:, None], x[:, 1:]], axis=1)
        assert best_penalty([(Ridge(told), noise, again, noise)], 2) < PENALTIES[-1]


class TestKnown:
    def test_the_next_token_is_read_from_where_it_was_worked_out(self) -> None:
        inputs = questions()
        for place in (1, 3):
            blocks = [Xor() if block == place else Nothing() for block in range(5)]
            found = read(Bits(*blocks), inputs)
            values = accuracy(found, "next token")
            # a question's answer, and one of four questions after an answer
            np.testing.assert_allclose(values[: place + 1], (0.5 + 0.25) / 2, atol=0.08)
            np.testing.assert_allclose(values[place + 1 :], (1 + 0.25) / 2, atol=0.05)
            assert first(found, "next token") == place + 1
            assert first(found, "current token") <= place + 1

    def test_the_position_is_read_from_where_it_was_written(self) -> None:
        found = read(Bits(Nothing(), Nothing(), Place(), Nothing()), questions())
        values = accuracy(found, "position")
        table = found.table[found.table["target"] == "position"]
        assert (table["classes"] == LENGTH - 1).all()  # the first is left out
        np.testing.assert_allclose(table["baseline"], 1 / (LENGTH - 1))
        # questions and answers take turns, so that half of the positions are ruled out
        assert (values[:3] < 0.2).all()
        np.testing.assert_array_equal(values[3:], 1)
        assert first(found, "position") == 3

    def test_a_token_that_is_forgotten(self) -> None:
        found = read(Bits(Nothing(), Forget(), Nothing()), questions())
        values, table = accuracy(found, "current token"), found.table[found.table["target"] == "current token"]
        # four corners of a square and two points besides it: a straight line does not tell them all apart
        assert (values[:2] > 0.6).all()
        np.testing.assert_allclose(values[2:], table["baseline"].to_numpy()[2:], atol=0.02)
        assert first(found, "current token") == 0

    def test_shuffled_labels_are_at_chance(self) -> None:
        table = read(Bits(Xor(), Place(), Nothing()), questions()).table
        most = table["baseline"] + 0.1
        assert (table["control"] <= most).all()
        assert (table["control_low"] <= table["control"]).all()
        assert (table["control"] <= table["control_high"]).all()

    def test_what_is_not_there_is_not_read(self) -> None:
        """Random tokens: more dimensions than examples would read all of them where they were fitted."""
        model, inputs = build("gpt2"), ids(24, 20, vocab=12)
        found = read(model, inputs, classes=4)
        values = found.table[found.table["target"] == "next token"]
        assert (values["accuracy"] - values["baseline"] < 0.12).all()
        assert np.isnan(first(found, "next token"))

    def test_by_hand(self) -> None:
        """Accuracy, baseline and counts of one state, with every step written out."""
        inputs, model = questions(12), Bits(Xor(), Nothing())
        found = read(model, inputs)
        with torch.no_grad():
            x = model.blocks[0](model.embed(inputs)).numpy()
        rows = found.table[found.table["target"] == "next token"].set_index("state")

        def right(fitted: list[int], others: list[int], penalty: float) -> list[np.ndarray]:
            flat, after = x[fitted][:, 1:-1].reshape(-1, WIDTH), inputs[fitted][:, 2:].numpy().ravel()
            mean, spread = flat.mean(axis=0), flat.std(axis=0)
            spread[spread < 1e-4] = np.inf  # of what is constant
            plain = RidgeClassifier(alpha=penalty * len(after)).fit((flat - mean) / spread, after)
            return [plain.predict((x[row, 1:-1] - mean) / spread) == inputs[row, 2:].numpy() for row in others]

        fits, one, other = [0, 2, 4, 6, 8, 10], [0, 4, 8], [2, 6, 10]
        trials = [sum(r.sum() for a, b in ((one, other), (other, one)) for r in right(a, b, p)) for p in PENALTIES]
        best = max(p for p, count in zip(PENALTIES, trials, strict=True) if count == max(trials))
        held = right(fits, list(range(1, 12, 2)), best)
        assert rows.loc[1, "accuracy"] == pytest.approx(np.mean([each.mean() for each in held]))
        after, truths = inputs[fits][:, 2:].numpy().ravel(), [inputs[row, 2:].numpy() for row in range(1, 12, 2)]
        common = np.bincount(after).argmax()
        assert rows.loc[1, "baseline"] == pytest.approx(np.mean([(t == common).mean() for t in truths]))
        assert rows.loc[1, ["classes", "train", "test"]].tolist() == [6, 132, 132]


class TestSampling:
    def test_batches_change_nothing(self) -> None:
        model, inputs = build("llama"), ids(12, 24, vocab=20)
        whole, one = read(model, inputs, batch_size=12), read(model, inputs, batch_size=5)
        np.testing.assert_allclose(whole.table["accuracy"], one.table["accuracy"], atol=0.01)
        for name in ("target", "state", "baseline", "classes", "train", "test"):
            assert whole.table[name].tolist() == one.table[name].tolist()

    def test_states_evenly_spaced(self) -> None:
        model = Bits(*(Nothing() for _ in range(9)))
        found = read(model, questions(), layers=4)
        assert found.table["state"].unique().tolist() == [0, 3, 6, 9]
        assert read(model, questions()).table["state"].nunique() == 8

    def test_memory_bounds_the_sample(self) -> None:
        inputs, few = questions(), 16 * WIDTH * 2 * 120  # two states at three positions a sequence
        kept = Kept(opened(Bits(Xor()), inputs), corpus_of(inputs), DepthSettings(memory=few), 2)
        assert kept.positions.shape == (40, 3)
        assert kept.positions.min() >= 1
        assert all(len({*row}) == 3 for row in kept.positions.tolist())
        assert len({tuple(row) for row in kept.positions.tolist()}) > 20
        assert read(Bits(Xor()), inputs, memory=few).table["train"].max() <= 60

    def test_the_most_frequent_classes(self) -> None:
        table = read(Bits(Xor()), questions(), classes=2).table
        assert set(table["classes"]) == {2}
        current = table[table["target"] == "current token"]  # both answers, which are half of all tokens
        assert (current["train"] == 20 * 12).all()
        np.testing.assert_array_equal(current["accuracy"], 1)

    def test_documents_are_whole(self) -> None:
        inputs = questions(10)
        owners = np.array([7, 7, 7, 7, 2, 2, 2, 9, 9, 4])
        corpus = replace(corpus_of(inputs), documents=owners)
        train = halves(corpus)
        assert all(len(set(train[owners == name])) == 1 for name in owners)
        assert train.sum() == 5
        np.testing.assert_array_equal(halves(corpus_of(inputs)), [True, False] * 5)
        one = replace(corpus, documents=np.zeros(10, dtype=np.int64))
        np.testing.assert_array_equal(halves(one), [True, False] * 5)
        assert (read(Bits(Xor()), inputs, corpus).table["train"] > 0).all()


class TestLeftOut:
    def test_one_sequence(self) -> None:
        found = read(Bits(Xor()), questions(1))
        assert found.table.empty
        assert found.first.empty
        assert "there is one" in found.notes[0]

    def test_two_sequences_have_no_interval(self) -> None:
        found = read(Bits(Xor()), questions(2))
        assert found.table["ci_low"].isna().all()
        assert found.table["accuracy"].notna().all()

    def test_float_states_have_a_position_only(self) -> None:
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
        inputs = torch.randn(12, 10, 16, generator=torch.Generator().manual_seed(0))
        found = read(model, inputs)
        assert set(found.table["target"]) == {"position"}
        assert any("given states" in note for note in found.notes)

    def test_an_encoder_is_shown_the_next_token(self) -> None:
        inputs = ids(12, 16, vocab=12)
        found = read(build("bert"), inputs)
        assert set(found.table["target"]) == {"current token", "position"}
        assert any("is shown it" in note for note in found.notes)

    def test_too_few_examples_are_said(self) -> None:
        found = read(build("gpt2"), ids(4, 12))
        assert "next token" not in set(found.table["target"])
        assert any(note.startswith("The next token was not read") for note in found.notes)
        few = read(Bits(Xor()), questions(6)).notes
        assert any("fewer than two a dimension" in note for note in few)
        assert not read(Bits(Xor()), questions(40)).notes

    def test_what_makes_no_sense(self) -> None:
        for options, word in (({"layers": 1}, "states"), ({"classes": 1}, "classes")):
            with pytest.raises(UsageError, match=word):
                read(Bits(Xor()), questions(), **options)

    def test_a_state_that_is_not_finite(self) -> None:
        model, inputs = Bits(Nothing(), Nothing()), questions()
        anatomy = opened(model, inputs)
        with torch.no_grad():
            model.embed.weight[3, 5] = torch.inf
        with pytest.raises(NonFiniteError, match="x_0 is not finite"):
            readable(anatomy, corpus_of(inputs))
