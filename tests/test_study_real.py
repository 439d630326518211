"""real_checkpoints.py: rows are what plain removal gives, words follow their rule, the README says what they say."""

from __future__ import annotations

import copy
import importlib
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers as T
from families import EMBEDDED, shake
from scipy import stats
from torch import Tensor

from depthprobe.corpus import Corpus
from depthprobe.errors import CheckpointError, OutputError, UsageError
from depthprobe.estimate import Interval
from depthprobe.lab.byte_tokens import byte_tokenizer
from depthprobe.measure import Settings, measure
from depthprobe.probes import growth

ROOT = Path(__file__).parent.parent
DECODER, ENCODER = "decoder", "encoder"


@pytest.fixture(scope="module")
def scripts() -> tuple[ModuleType, ModuleType]:
    """Scripts import each other as they do where they are run: from their own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "analyses"))
        return importlib.import_module("real_checkpoints"), importlib.import_module("real_findings")


@pytest.fixture(scope="module")
def small(scripts: tuple[ModuleType, ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run over a decoder and an encoder of few blocks, all positions scored, from the command line."""
    real, home = scripts[0], tmp_path_factory.mktemp("small")
    torch.manual_seed(3)
    config = T.BertConfig(
        vocab_size=257, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=32,
    )  # fmt: skip
    shake(T.BertModel(config)).save_pretrained(home / ENCODER)
    byte_tokenizer(positions=32).save_pretrained(home / ENCODER)
    with tiny(real, home):
        assert real.main(line(home)) == 0
    yield home
    real.opened.cache_clear()


@contextmanager
def tiny(real: ModuleType, home: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(real, "MODELS", {DECODER: EMBEDDED, ENCODER: home / ENCODER})
        patch.setattr(real, "SCORED", 1.0)
        patch.setattr(real, "SHUFFLES", 2)
        yield


def line(home: Path) -> list[str]:
    return ["--sequences", "5", "--tokens", "16", "--results", str(home / "t.csv")]


def model(scripts: tuple[ModuleType, ModuleType], home: Path, name: str) -> Any:
    real = scripts[0]
    return {found.name: found for found in real.models(real.load_table(home / "t.csv"))}[name]


# A small run


def test_the_run_writes_table_figure_and_section(scripts: tuple[ModuleType, ModuleType], small: Path) -> None:
    real = scripts[0]
    table = real.load_table(small / "t.csv")
    assert list(table.columns) == list(real.COLUMNS)
    counts = table[table["sequence"] == 0].groupby(["model", "measurement"]).size()
    assert counts[DECODER, "removal"] == 8 + 7 + 7  # a run of a fifth is two blocks at least
    assert counts[ENCODER, "removal"] == 4 + 3 + 3
    assert counts[DECODER, "order"] == counts[ENCODER, "order"] == 4 + 2
    assert counts[DECODER, "states"] == 9
    with tiny(real, small):
        section = real.section(small, "t.csv")
        said = section.text([])
        real.study.write_figures(section, small)
    assert said.count("| **not comparable**: ") == len(scripts[1].FINDINGS) + 1  # all of the encoder's, and one more
    assert (small / "real_checkpoints.png").stat().st_size > 20_000


def test_a_second_run_measures_nothing_and_says_the_same(
    scripts: tuple[ModuleType, ModuleType], small: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    real, before = scripts[0], (small / "t.csv").read_bytes()
    monkeypatch.setattr(real, "measured", None)
    with tiny(real, small):
        assert real.main(line(small)) == 0
        assert real.findings(real.load_table(small / "t.csv")) in capsys.readouterr().out
    assert (small / "t.csv").read_bytes() == before


def test_another_size_in_the_same_table_is_refused(
    scripts: tuple[ModuleType, ModuleType], small: Path, tmp_path: Path
) -> None:
    table = pd.read_csv(small / "t.csv")
    table.assign(tokens=table["sequence"] + 16).to_csv(tmp_path / "sizes.csv", index=False)
    table[table["measurement"] != "order"].to_csv(tmp_path / "parts.csv", index=False)
    for name, words in (("sizes", "several sizes"), ("parts", "lacks a measurement")):
        with pytest.raises(OutputError, match=words):
            scripts[0].load_table(tmp_path / f"{name}.csv")


def test_what_is_wrong_is_said(
    scripts: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = scripts[0]
    assert real.main(["--models", "GPT-5"]) == UsageError.exit_code
    assert real.main(["--sequences", "1"]) == UsageError.exit_code
    monkeypatch.setattr(real, "MODELS", {"MiniLM": Path("/nowhere/all-MiniLM-L6-v2")})
    assert real.main(["--models", "MiniLM"]) == CheckpointError.exit_code
    assert "make weights" in capsys.readouterr().err


# Against plain removal


def sequences(scripts: tuple[ModuleType, ModuleType], small: Path, name: str) -> tuple[Any, Any]:
    """The model as transformers has it, and the ids that it was run on."""
    anatomy, corpus = scripts[0].opened(name, 5, 16)
    return anatomy.stream.checkpoint.model, corpus.inputs


def states_of(blocks: Any, run: Any) -> list[Tensor]:
    """What each block reads and the last one writes, `[sequences, tokens, width]`."""
    seen: list[Tensor] = []
    hooks = [block.register_forward_pre_hook(lambda _, given: seen.append(given[0])) for block in blocks]
    hooks.append(
        blocks[-1].register_forward_hook(
            lambda _, given, made: seen.append(made[0] if isinstance(made, tuple) else made)
        )
    )
    run()
    for hook in hooks:
        hook.remove()
    return seen


@torch.no_grad()
def test_rankings_are_scipys_of_a_plain_removal(scripts: tuple[ModuleType, ModuleType], small: Path) -> None:
    """Blocks are taken out of a copy of the model's own list, one after another; states come from hooks."""
    _, found = scripts
    original, ids = sequences(scripts, small, DECODER)

    def loss(gone: range) -> float:
        shorter = copy.deepcopy(original)
        kept = [block for i, block in enumerate(shorter.transformer.h) if i not in gone]
        shorter.transformer.h = torch.nn.ModuleList(kept)
        return float(shorter(input_ids=ids, labels=ids, use_cache=False).loss)

    base = loss(range(0))
    states = states_of(original.transformer.h, lambda: original(input_ids=ids, use_cache=False))
    cosine = torch.nn.functional.cosine_similarity
    influence = [float(1 - cosine(a, b, dim=-1).mean()) for a, b in pairwise(states)]
    rows = model(scripts, small, DECODER)
    np.testing.assert_allclose(rows.grid("block_influence").mean(axis=0), influence, atol=1e-5)
    for count, value in ((1, found.influence(rows)), (1, found.angles(rows, 1)), (2, found.angles(rows, 2))):
        costs = [loss(range(i, i + count)) - base for i in range(9 - count)]
        np.testing.assert_allclose(rows.grid("delta_loss", "delete", count).mean(axis=0), costs, atol=2e-4)
        turned = [cosine(states[i][:, -1], states[i + count][:, -1], dim=-1).arccos().mean() for i in range(9 - count)]
        guess = influence if value == found.influence(rows) else [float(angle) for angle in turned]
        assert value.value == pytest.approx(stats.spearmanr(guess, costs).statistic, abs=1e-9)
        assert value.low <= value.value <= value.high


@torch.no_grad()
def test_agreement_is_that_of_a_plain_deletion_and_swap(scripts: tuple[ModuleType, ModuleType], small: Path) -> None:
    original, ids = sequences(scripts, small, DECODER)
    best = original(input_ids=ids).logits[:, :-1].argmax(dim=-1)
    rows = model(scripts, small, DECODER)
    for change, order in (("delete", [0, 1, 2, 4, 5, 6, 7]), ("swap", [0, 1, 2, 4, 3, 5, 6, 7])):
        other = copy.deepcopy(original)
        other.transformer.h = torch.nn.ModuleList([other.transformer.h[i] for i in order])
        same = other(input_ids=ids, use_cache=False).logits[:, :-1].argmax(dim=-1) == best
        np.testing.assert_allclose(rows.kept(change)[:, 3], same.double().mean(dim=1), atol=1e-6)


@torch.no_grad()
def test_without_a_head_the_last_state_is_compared_and_nothing_is_judged(
    scripts: tuple[ModuleType, ModuleType], small: Path
) -> None:
    original, ids = sequences(scripts, small, ENCODER)
    shorter = copy.deepcopy(original)
    del shorter.encoder.layer[2]
    a, b = (net(input_ids=ids).last_hidden_state for net in (original, shorter))
    rows = model(scripts, small, ENCODER)
    assert not rows.head
    assert rows.rows["top1_agreement"].isna().all()
    cosine = torch.nn.functional.cosine_similarity(a, b, dim=-1).mean(dim=1)
    np.testing.assert_allclose(rows.kept("delete")[:, 2], cosine, atol=1e-5)
    assert {finding.verdict(rows).partition(":")[0] for finding in scripts[1].FINDINGS} == {"not comparable"}


def test_the_middle_and_the_ends(scripts: tuple[ModuleType, ModuleType], small: Path) -> None:
    rows, found = model(scripts, small, DECODER), scripts[1]
    assert list(found.middle(30)) == list(range(7, 22))
    assert list(found.middle(6)) == [1, 2, 3]
    deleted, swapped = rows.grid("top1_agreement", "delete", 1), rows.grid("top1_agreement", "swap", 2)
    assert found.kept(rows, "delete").value == pytest.approx(deleted[:, 2:6].mean())
    assert found.kept(rows, "swap").value == pytest.approx(swapped[:, 2:5].mean())  # 2 and 3 to 4 and 5
    assert found.end(rows, -1).value == pytest.approx(deleted[:, -1].mean() - deleted[:, 2:6].mean())
    assert found.swapped(rows).value == pytest.approx(swapped[:, 2:5].mean() - deleted[:, 2:6].mean())


# States


def test_sizes_of_a_state_by_hand(scripts: tuple[ModuleType, ModuleType]) -> None:
    x = torch.ones(2, 5, 4)
    x[0, 0, 1] = -300.0  # norm about 300, against 2
    x[0, 3, 2] = 120.0
    first, later, ratio, largest, over = scripts[0].sizes(x)
    assert first.tolist() == [True, False]
    assert later.tolist() == [1, 0]
    assert ratio[0].item() == pytest.approx(math.hypot(300, math.sqrt(3)) / 2)
    assert largest.tolist() == [300.0, 1.0]
    assert over.tolist() == [300.0, 1.0]


def test_large_positions_are_the_librarys(
    scripts: tuple[ModuleType, ModuleType], small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = scripts[0]
    anatomy, corpus = real.opened(DECODER, 5, 16)
    for module in (real, growth):
        monkeypatch.setattr(module, "SINK_RATIO", 1.3)
    walked = real.walked(anatomy, corpus)
    sinks = {sink.position: sink for sink in measure(anatomy, corpus, Settings(interaction=False)).sinks}
    with_first = set(np.flatnonzero(walked["sinks_first"].any(axis=1)).tolist())
    with_later = set(np.flatnonzero(walked["sinks_later"].any(axis=1)).tolist())
    assert with_first == (sinks[0].sequences if 0 in sinks else set())
    assert with_later == set().union(*(sink.sequences for place, sink in sinks.items() if place))
    assert with_later
    assert walked["norm_ratio"].max() == pytest.approx(max(sink.max_ratio for sink in sinks.values()), rel=1e-5)


def test_sequences_are_spread_over_documents(scripts: tuple[ModuleType, ModuleType]) -> None:
    owners = np.array([0] * 10 + [1, 1, 2])
    corpus = Corpus(torch.arange(13)[:, None].repeat(1, 4), owners, "text", "", "")
    assert sorted(scripts[0].several(corpus, 3).documents) == [0, 1, 2]
    assert sorted(scripts[0].several(corpus, 5).documents) == [0, 0, 1, 1, 2]
    again = [scripts[0].several(corpus, 5).inputs for _ in range(2)]
    assert torch.equal(*again)
    assert len(again[0].unique(dim=0)) == 5


# The rule, and tables with known answers


@pytest.mark.parametrize(
    ("low", "high", "published", "word"),
    [
        (0.7, 0.9, (0.8, 0.8), "same"), (0.81, 0.9, (0.8, 0.8), "different"), (0.8, 0.9, (0.8, 0.8), "same"),
        (0.73, 0.94, (0.72, 0.95), "same"), (0.2, 0.71, (0.72, 0.95), "different"),
        (0.96, 1.0, (0.72, 0.95), "different"), (0.1, 1.0, (0.72, 0.95), "undecided"),
        (0.7, 0.8, (0.72, 0.95), "undecided"), (0.9, 0.99, (0.72, 0.95), "undecided"),
        (0.1, 0.3, (0.0, math.inf), "same"), (-0.3, -0.1, (0.0, math.inf), "different"),
        (-0.1, 0.1, (0.0, math.inf), "undecided"), (-0.3, -0.1, (-math.inf, 0.0), "same"),
        (1.0, 1.0, (1.0, 1.0), "same"), (0.9, 0.99, (1.0, 1.0), "different"),
        (math.nan, math.nan, (0.0, math.inf), "undecided"), (math.nan, math.nan, (1.0, 1.0), "undecided"),
    ],
)  # fmt: skip
def test_the_verdict(
    scripts: tuple[ModuleType, ModuleType], low: float, high: float, published: tuple[float, float], word: str
) -> None:
    assert scripts[1].judged(Interval((low + high) / 2, low, high), *published) == word


def made_up(real: ModuleType, turned: bool) -> pd.DataFrame:
    """Twelve blocks of which all that was published holds; `turned` around, none of it does."""
    rng, rows, blocks, harm = np.random.default_rng(0), [], 12, -1.0 if turned else 1.0
    kept = [0.9 if turned else 0.1, *[0.5 if turned else 0.8] * (blocks - 2), 0.9 if turned else 0.2]
    cost = [3.0, *(1.2 - 0.1 * i for i in range(1, blocks))]

    def add(change: str, count: int, layer: int, seed: int, values: dict[str, float]) -> None:
        for sequence in range(8):
            noisy = {name: value * (1 + rng.normal(0, 1e-4)) for name, value in values.items()}
            place = (MEASUREMENT.get(change, "order"), 8, 16, change, count, layer, seed, sequence, sequence)
            rows.append(dict(zip(real.COLUMNS, ("model", *place), strict=False)) | noisy)

    for layer in range(blocks):
        add("delete", 1, layer, 0, {"top1_agreement": kept[layer], "delta_loss": cost[layer], "state_distance": 0.1})
    for layer in range(blocks - 1):
        add("swap", 2, layer, 0, {"top1_agreement": 0.4 if turned else 0.9, "delta_loss": 0.1, "state_distance": 0.1})
        add("delete", 2, layer, 0, {"top1_agreement": 0.5, "delta_loss": 2 * cost[layer], "state_distance": 0.1})
    for place, variant in enumerate(("shuffle", "reverse", "parallel", "skip", "repeat")):
        add(variant, 6, 3, 0, {"top1_agreement": 0.5, "delta_loss": 5 + harm * place, "state_distance": 0.1})
    for layer in range(blocks + 1):
        sink = layer >= (6 if turned else 2) and not turned
        values = {"sinks_first": float(sink), "sinks_later": 0.0, "norm_ratio": 2.0, "largest": 300.0 if sink else 50.0}
        values["largest_ratio"] = 5000.0 if sink else 20.0
        if layer < blocks:
            angle = 1 + harm * cost[layer] / 10
            values |= dict.fromkeys(("block_influence", "block_influence_later", "angle"), angle)
            values["cosine"] = -0.1 if layer < (2 if turned else 6) else 0.1
            values["cosine_attention"] = values["cosine_mlp"] = values["cosine"]
            if layer < blocks - 1:
                values["angle_span"] = angle
        add("states", 0, layer, 0, values)
    return pd.DataFrame(rows, columns=real.COLUMNS)


MEASUREMENT = {"delete": "removal", "swap": "removal", "states": "states"}


@pytest.mark.parametrize("turned", [False, True])
def test_verdicts_of_tables_with_known_answers(scripts: tuple[ModuleType, ModuleType], turned: bool) -> None:
    real, found = scripts
    (rows,) = real.models(made_up(real, turned))
    words = {finding.what: finding.verdict(rows).partition(":")[0] for finding in found.FINDINGS}
    assert words.pop("other positions are, too") == "not comparable"
    early = words.pop("such activations appear early")
    assert early == ("undecided" if turned else "different")  # at x_2 of 12, and the published 2 of 32
    assert set(words.values()) == {"different" if turned else "same"}, words
    assert found.crossing(rows).value == pytest.approx((2 if turned else 6) / 12)
    assert math.isnan(found.emergence(rows).value) if turned else found.emergence(rows).value == pytest.approx(2 / 12)
    assert found.in_order(rows).value == (0.0 if turned else 1.0)
    assert found.worse(rows, ("shuffle", "reverse")).value == pytest.approx(-1 if turned else 1, abs=0.01)


def test_numbers_and_orders_are_counted_apart(scripts: tuple[ModuleType, ModuleType]) -> None:
    """Every finding once: by its kind, and those that the preregistration does not have after a dagger."""
    real, found = scripts
    (rows,) = real.models(made_up(real, turned=False))
    said = found.counts(rows)
    parts = re.findall(r"(Numbers|Orders|Whether)[^:]*: ([^.;]*)(?:; † ([^.;]*))?\.", said)
    assert [kind for kind, *_ in parts] == ["Numbers", "Orders", "Whether"]
    counted = [sum(map(int, re.findall(r"\d+", part))) for _, *each in parts for part in each]
    wanted = [
        sum((each.kind, each.fixed) == (kind, fixed) for each in found.FINDINGS)
        for kind in found.KINDS for fixed in (True, False)
    ]  # fmt: skip
    assert counted == wanted
    assert sum(counted) == len(found.FINDINGS)
    assert parts[0][1:] == ("3 same", "1 different")
    numbers = {each.what for each in found.FINDINGS if each.kind == "number"}
    signs = {each.what for each in found.FINDINGS if math.inf in map(abs, each.within)}
    assert not numbers & signs
    for each in found.FINDINGS:
        assert any(digit in each.published for digit in "0123456789") or each.kind != "number", each.what
    assert not any(each.fixed for each in found.FINDINGS if each.what.endswith("block harms more"))


# The README


def test_the_readme_says_what_the_table_says(scripts: tuple[ModuleType, ModuleType]) -> None:
    real = scripts[0]
    table = real.load_table(ROOT / "data" / "results" / "real_checkpoints.csv")
    assert {*table["model"]} == {*real.MODELS}
    text = (ROOT / "analyses" / "README.md").read_text()
    assert real.study.section(text, real.NAME) == real.findings(table)
