"""The verb `ablate`: known values, its table, ρ and the proxies, controls, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from by_hand import deep, opened
from families import build, ids
from scipy import stats
from torch import Tensor, nn

import depthprobe
from depthprobe import Checkpoint
from depthprobe.ablation import Ablations, ablate, default_schedules
from depthprobe.ablations.kinds import KINDS, controls
from depthprobe.ablations.run import Swept
from depthprobe.ablations.schedule import Schedule, Unit, attention_first, merge, parse, skip, unmodified
from depthprobe.ablations.sweep import Trie, run_batch
from depthprobe.ablations.table import COLUMNS, merge_against_skip, proxies
from depthprobe.ablations.units import Units
from depthprobe.corpus import Corpus
from depthprobe.errors import DepthprobeError, UsageError
from depthprobe.estimate import Resampler

METRICS = ("delta_loss", "kl", "top1_agreement", "state_distance")


def run(model: Any, made: list[Any] | None = None, inputs: Tensor | None = None, **options: Any) -> Ablations:
    data = ids(6, 24) if inputs is None else inputs
    return ablate(model, made, data, device="cpu", **{"tokens": data.numel(), **options})


def value(found: Ablations, schedule: str, metric: str) -> float:
    rows = found.table.query("schedule == @schedule and metric == @metric")
    assert len(rows) == 1, (schedule, metric, len(rows))
    return float(rows["value"].iloc[0])


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.real
@pytest.mark.slow
def test_known_values(smollm2: Checkpoint, two_threads: None) -> None:
    """SmolLM2-135M (Q4_1) on the manual's topics sorted by name, without BOS."""
    from pydoc_data.topics import topics

    assert smollm2.dtype == torch.float32
    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokens = smollm2.tokenizer(text[:8000], add_special_tokens=False)["input_ids"][: 4 * 256]
    skips = {0: 7.95, 8: 1.05, 11: 1.76, 29: 2.51}
    merges = {5: 0.017, 20: 0.021, 26: 0.005, 28: 1.63}
    made = [skip(30, [i]) for i in skips] + [merge(30, [i, i + 1]) for i in merges]
    found = ablate(smollm2, made, torch.tensor(tokens).reshape(4, 256), tokens=1024, seq_len=256)
    assert found.merging["base_loss"]["value"] == pytest.approx(2.861, abs=0.002)
    got = found.table.query("metric == 'delta_loss'").set_index("schedule")["value"]
    for schedule, want in zip(made, [*skips.values(), *merges.values()], strict=True):
        assert got[str(schedule)] == pytest.approx(want, abs=0.01), str(schedule)
    for layer, want in merges.items():  # the small ones are known to the last digit given
        if want < 0.1:
            assert got[str(merge(30, [layer, layer + 1]))] == pytest.approx(want, abs=0.001)


@pytest.mark.real
def test_a_headless_encoder_has_state_distance_alone(minilm: Checkpoint) -> None:
    made = ["0-3 (4+5)", parse("0-3 (4a+5a) (4m+5m)", "branch-sum"), skip(6, [2])]
    found = run(minilm, made, ids(4, 32, vocab=20000))
    assert set(found.table["metric"]) == {"state_distance"}
    assert found.merging["base_loss"] is None
    assert len(found.merging["notes"]) == 1
    assert "no language-model head" in found.merging["notes"][0]
    # Post-LN: a sum keeps each block's normalisation as part of its update, branch-sum does not.
    assert value(found, "0-3 (4a+5a) (4m+5m)", "state_distance") < value(found, "0-3 (4+5)", "state_distance")


class TestTable:
    def test_has_the_documented_columns_and_kinds(self) -> None:
        made = default_schedules(5, KINDS, span=3)
        found = run(deep("llama", 5), made)
        table = found.table
        assert tuple(table.columns) == COLUMNS
        documented = "schedule,kind,unit,layers,combine,metric,value,ci_low,ci_high,n"
        assert ",".join(table.columns) == documented
        assert len(table) == len(made) * len(METRICS)
        assert set(table["metric"]) == set(METRICS)
        assert set(table["kind"]) == {"skip", "merge", "swap", "repeat", "reverse", "shuffle", "custom", "control"}
        assert set(table["unit"]) == {"block", "sublayer"}
        assert (table["n"] == 6).all()
        assert not table.isna().any().any()
        assert not table.duplicated(["schedule", "combine", "metric"]).any()
        assert (table["ci_low"] <= table["value"] + 1e-12).all()
        assert (table["value"] <= table["ci_high"] + 1e-12).all()
        shown = table[table["metric"] == "kl"].set_index("schedule")
        assert shown.loc["0-1 (2+3+4)", ["kind", "layers", "combine"]].tolist() == ["merge", "2,3,4", "sum"]
        assert shown.loc["0-1 3-4", ["kind", "layers", "combine"]].tolist() == ["skip", "2", ""]
        assert shown.loc["0 (1+3) 2 4", ["kind", "layers", "combine"]].tolist() == ["control", "1,3", "sum"]
        noise = table[table["schedule"].str.contains("random vector")]
        assert set(noise["kind"]) == {"control"}
        assert set(noise["combine"]) == {""}

    def test_means_and_intervals_are_those_of_the_sequences(self) -> None:
        found = run(deep("llama", 4), [skip(4, [1]), merge(4, [1, 2])], ids(12, 24))
        kl = found.swept.effects["kl"]
        rows = found.table[found.table["metric"] == "kl"]
        np.testing.assert_allclose(rows["value"], kl.mean(axis=0), rtol=1e-12)
        rng = np.random.default_rng(1)
        draws = kl[rng.integers(0, 12, (20000, 12))].mean(axis=1)
        low, high = np.quantile(draws, [0.025, 0.975], axis=0)
        width = high - low
        np.testing.assert_allclose(rows["ci_low"], low, atol=0.1 * width.max())
        np.testing.assert_allclose(rows["ci_high"], high, atol=0.1 * width.max())

    def test_intervals_are_paired(self) -> None:
        """Sequences differ much in their loss; what costs nothing still costs exactly nothing, without any doubt."""
        found = run(build("llama"), ["0-2", "0 1a 1m 2", "0 2"], ids(8, 24))
        assert np.ptp(found.swept.base_loss) > 0.1
        for schedule in ("0-2", "0 1a 1m 2"):
            for metric in METRICS:
                row = found.table.query("schedule == @schedule and metric == @metric").iloc[0]
                want = 1.0 if metric == "top1_agreement" else 0.0
                assert row["value"] == row["ci_low"] == row["ci_high"] == want, (schedule, metric)
        changed = found.table.query("schedule == '0 2' and metric == 'delta_loss'").iloc[0]
        assert changed["ci_high"] > changed["ci_low"]

    def test_base_loss_is_the_models(self) -> None:
        model, inputs = build("llama"), ids(6, 24)
        found = run(model, ["0 2"], inputs)
        with torch.no_grad():
            logits = model(input_ids=inputs, use_cache=False).logits.double()
        want = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), inputs[:, 1:])
        base = found.merging["base_loss"]
        assert base["value"] == pytest.approx(float(want), rel=1e-6)
        assert base["ci_low"] < base["value"] < base["ci_high"]

    def test_what_it_took_is_stated(self) -> None:
        found = run(deep("llama", 6), default_schedules(6, ("skip", "merge"), controls=False), batch_size=3)
        assert found.merging["evaluations"] == 2 * (6 + 25), "two batches"
        assert found.merging["plain_evaluations"] == 2 * 2 * 6 * 5
        assert found.merging["sequences"] == 6
        assert found.merging["tokens"] == 24
        assert found.merging["seconds"] > 0

    def test_frames_are_copies(self) -> None:
        found = run(build("llama"), ["0 2"])
        frame = found.to_frame()
        frame.loc[:, "value"] = 0.0
        assert (found.table["value"] != 0).any()

    def test_strings_take_the_combination_that_was_asked_for(self) -> None:
        model = build("llama")
        by_text = run(model, ["(0+1) 2"], combine="mean")
        by_hand = run(model, [merge(3, [0, 1], "mean")])
        assert value(by_text, "(0+1) 2", "kl") == value(by_hand, "(0+1) 2", "kl")
        assert set(by_text.table["combine"]) == {"mean"}
        assert value(by_text, "(0+1) 2", "kl") != value(run(model, ["(0+1) 2"]), "(0+1) 2", "kl")

    def test_averaged_weights_say_that_they_are_no_schedule(self) -> None:
        found = run(build("llama"), [merge(3, [0, 1], "weights"), merge(3, [0, 1])])
        assert len(set(found.table["schedule"])) == 2
        assert any("averaged weights" in name for name in found.table["schedule"])


class TestDefaults:
    @pytest.mark.parametrize("blocks", [1, 2, 3, 12])
    def test_have_no_duplicates_and_include_the_controls(self, blocks: int) -> None:
        made = default_schedules(blocks)
        keys = [(s.stages, s.combine if s.merges else "") for s in made]
        assert len(set(keys)) == len(keys)
        texts = {str(s) for s in made}
        want = {str(skip(blocks, [i])) for i in range(blocks)}
        want |= {str(merge(blocks, [i, i + 1])) for i in range(blocks - 1)}
        want |= {str(s) for s in controls(blocks)}
        assert want <= texts
        assert len(texts) == blocks + 4 * (blocks - 1) + max(0, blocks - 2)
        alone = default_schedules(blocks, controls=False)
        assert len(alone) == blocks + 2 * (blocks - 1)

    @pytest.mark.parametrize("blocks", [1, 2])
    @pytest.mark.parametrize("name", ["llama", "bert-headless"])
    def test_shallow_models(self, blocks: int, name: str) -> None:
        found = run(deep(name, blocks))
        made = default_schedules(blocks, post_ln=name != "llama")
        assert len(found.table) == len(made) * (4 if name == "llama" else 1)
        assert (found.table["schedule"] != "").all()
        assert found.table.query("metric == 'state_distance'")["value"].max() > 1e-3

    def test_ablate_runs_them(self) -> None:
        found = run(deep("llama", 4))
        assert set(found.table["schedule"]) == {schedule.label for schedule in default_schedules(4)}
        assert [row["layer"] for row in found.merging["rho"]["layers"]] == [0, 1, 2]

    def test_post_ln_merges_are_made_in_every_way(self) -> None:
        found = run(deep("bert-headless", 4))
        rows = found.table[found.table["kind"] == "merge"]
        got = set(zip(rows["schedule"], rows["combine"], strict=True))
        assert got == {
            (str(made), made.combine)
            for i in range(3)
            for made in (
                merge(4, [i, i + 1]),
                merge(4, [i, i + 1], "mean"),
                attention_first(4, [i, i + 1]),
                attention_first(4, [i, i + 1], "branch-sum"),
            )
        }
        assert len(rows) == len(got)
        assert len(set(rows["value"].round(9))) == len(got)

    def test_a_part_of_a_corpus_is_spread_evenly(self) -> None:
        whole = Corpus(ids(10, 8), np.arange(10), "", "", "")
        part = whole.spread(8 * 4)
        assert part.inputs.tolist() == whole.inputs[[0, 3, 6, 9]].tolist()
        assert part.documents.tolist() == [0, 3, 6, 9]
        assert whole.spread(10**9).sequences == 10
        assert whole.spread(1).sequences == 1


class TestControls:
    def test_in_half_precision_it_is_said_what_the_random_vector_is(self) -> None:
        notes = {
            dtype: " ".join(depthprobe.ablate(deep("llama", 3).to(dtype), controls(3), ids(3, 12)).merging["notes"])
            for dtype in (torch.float32, torch.bfloat16)
        }
        assert "In bfloat16 the norm of a merge's random vector" in notes[torch.bfloat16]
        assert "random vector" not in notes[torch.float32]

    def test_the_random_vector_has_the_norm_of_what_the_merge_drops(self) -> None:
        """Read at x_{i+2}: the schedules are cut off there. Not the same direction, nor that of other tokens."""
        blocks = 4
        anatomy = opened(deep("llama", blocks), ids(3, 20))
        entry = anatomy.stream.enter(ids(3, 20))

        class Ends:
            def __init__(self) -> None:
                self.ends: list[Tensor] = []

            def compare(self, x: Tensor) -> dict[str, np.ndarray]:
                self.ends.append(x)
                return {"place": np.array([len(self.ends) - 1])}

        def unit_vector(layer: int, like: Tensor) -> Tensor:
            drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(layer))
            return drawn / drawn.norm(dim=-1, keepdim=True)

        noise = [made for made in controls(blocks) if "random" in made.label]
        assert len(noise) == blocks - 1
        for i, made in enumerate(noise):
            cut = [
                Schedule(made.stages[: i + 3]),
                Schedule(unmodified(blocks).stages[: i + 2]),
                Schedule((*unmodified(blocks).stages[:i], (Unit(i), Unit(i + 1)))),
            ]
            assert cut[0].stages[-1][0].part == "~"
            ends = Ends()
            with torch.no_grad():
                effects, _ = run_batch(Units(anatomy), entry, Trie.of(cut), lambda last, ends=ends: ends, unit_vector)
            noisy, plain, merged = (ends.ends[int(effects[k]["place"][0])] for k in range(3))
            added, dropped = noisy - plain, plain - merged
            torch.testing.assert_close(added.norm(dim=-1), dropped.norm(dim=-1), rtol=1e-3, atol=1e-4)
            assert torch.cosine_similarity(added, dropped, dim=-1).abs().mean() < 0.5

    def test_the_random_vector_is_keyed_by_seed_and_sequence(self) -> None:
        model, made = deep("llama", 4), controls(4)[-2:]
        one, again, other = (run(model, made, seed=seed).swept.effects["kl"] for seed in (0, 0, 1))
        np.testing.assert_array_equal(one, again)
        assert (one != other).all()
        same = ids(1, 24).expand(4, -1)
        kl = run(model, made, same).swept.effects["kl"]
        assert len(set(kl[:, 0])) == 4, "equal sequences get vectors of their own"


def made_up(sequences: int = 40, blocks: int = 8, seed: int = 0) -> Swept:
    rng = np.random.default_rng(seed)
    made = default_schedules(blocks, ("skip", "merge", "swap"))
    kl = rng.gamma(2.0, 0.1, (sequences, len(made))) * np.linspace(0.3, 2, len(made))
    return Swept(made, {"kl": kl, "state_distance": kl / 7}, None, None, 0, 0, 0.0)


def column(swept: Swept, schedule: Schedule) -> np.ndarray:
    return swept.effects["kl"][:, [str(s) for s in swept.schedules].index(str(schedule))]


class TestRho:
    def test_against_a_direct_computation(self) -> None:
        swept = made_up()
        found = merge_against_skip(swept, Resampler(40))
        want = [column(swept, merge(8, [i, i + 1])).mean() / column(swept, skip(8, [i])).mean() for i in range(7)]
        np.testing.assert_allclose([row["value"] for row in found["layers"]], want, rtol=1e-9)
        assert [row["layer"] for row in found["layers"]] == list(range(7))
        assert found["median"]["value"] == pytest.approx(np.median(want))
        slope = stats.linregress(np.arange(7) / 6, np.log(want)).slope
        assert found["slope"]["value"] == pytest.approx(slope, rel=1e-9)
        assert found["cost"] == "kl"

    def test_intervals_against_a_bootstrap_of_pairs(self) -> None:
        swept = made_up(sequences=60)
        found = merge_against_skip(swept, Resampler(60))
        rng = np.random.default_rng(5)
        rows = rng.integers(0, 60, (4000, 60))
        above = np.stack([column(swept, merge(8, [i, i + 1])) for i in range(7)], axis=1)
        below = np.stack([column(swept, skip(8, [i])) for i in range(7)], axis=1)
        ratios = above[rows].mean(axis=1) / below[rows].mean(axis=1)
        slopes = np.polyfit(np.arange(7) / 6, np.log(ratios).T, 1)[0]
        for interval, draws in [
            *((row, ratios[:, i]) for i, row in enumerate(found["layers"])),
            (found["median"], np.median(ratios, axis=1)),
            (found["slope"], slopes),
        ]:
            low, high = np.quantile(draws, [0.025, 0.975])
            assert interval["ci_low"] == pytest.approx(low, abs=0.12 * (high - low))
            assert interval["ci_high"] == pytest.approx(high, abs=0.12 * (high - low))

    def test_pairs_that_move_together_leave_no_doubt(self) -> None:
        swept = made_up()
        for i in range(7):
            column_of = [str(s) for s in swept.schedules].index(str(merge(8, [i, i + 1])))
            swept.effects["kl"][:, column_of] = column(swept, skip(8, [i])) / 4
        found = merge_against_skip(swept, Resampler(40))
        for row in (*found["layers"], found["median"]):
            assert row["value"] == pytest.approx(0.25)
            assert row["ci_high"] - row["ci_low"] < 1e-9
        assert abs(found["slope"]["value"]) < 1e-9

    def test_is_left_out_where_there_is_no_merge_or_no_skip(self) -> None:
        model = deep("llama", 4)
        assert run(model, [skip(4, [i]) for i in range(4)]).merging["rho"] is None
        assert run(model, [merge(4, [i, i + 1]) for i in range(3)]).merging["rho"] is None

    def test_counts_neighbours_summed_alone(self) -> None:
        """No merge of three, of blocks apart, by mean or of sublayers, and no skip of two stands in for them."""
        model = deep("llama", 4)
        clean = [skip(4, [i]) for i in range(4)] + [merge(4, [i, i + 1]) for i in range(3)]
        decoys = [merge(4, [0, 1, 2]), merge(4, [0, 2]), merge(4, [0, 1], "mean"), merge(4, [1, 2], part="a")]
        decoys += [skip(4, [0, 1]), skip(4, [1], "m"), merge(4, [2, 3], "weights")]
        one, other = run(model, clean).merging["rho"], run(model, clean + decoys).merging["rho"]
        assert one == other
        assert run(model, decoys + clean).merging["rho"] == one


class TestProxies:
    def _frames(self, blocks: int) -> tuple[pd.DataFrame, pd.DataFrame]:
        rng = np.random.default_rng(2)
        rows = [
            {"layer": layer, "unit": unit, "metric": metric, "value": rng.random()}
            for metric in ("block_influence", "update_ratio", "interaction_error", "residual_norm")
            for unit in ("block", "mlp")
            for layer in range(blocks - (metric == "interaction_error"))
        ]
        pairs = [
            {"i": i, "j": j, "metric": metric, "value": rng.random()}
            for metric in ("angular_distance", "cosine")
            for i in range(blocks + 1)
            for j in range(i + 1, blocks + 1)
        ]
        return pd.DataFrame(rows), pd.DataFrame(pairs)

    def test_against_scipy(self) -> None:
        swept, (layers, pairs) = made_up(), self._frames(8)
        found = {row["proxy"]: row for row in proxies(swept, layers, pairs, Resampler(40))}
        skips = np.array([column(swept, skip(8, [i])).mean() for i in range(8)])
        merges = np.array([column(swept, merge(8, [i, i + 1])).mean() for i in range(7)])
        near = pairs.query("metric == 'angular_distance' and j == i + 1").sort_values("i")["value"]
        for name, cost in (("block_influence", skips), ("update_ratio", skips), ("interaction_error", merges)):
            cheap = layers.query("metric == @name and unit == 'block'").sort_values("layer")["value"]
            assert found[name]["value"] == pytest.approx(stats.spearmanr(cheap, cost).statistic), name
            assert found[name]["ci_low"] <= found[name]["value"] <= found[name]["ci_high"]
        assert found["angular_distance"]["value"] == pytest.approx(stats.spearmanr(near, skips).statistic)
        assert {row["cost"] for row in found.values()} == {"kl of skip", "kl of merge"}
        assert set(found) == {"block_influence", "update_ratio", "angular_distance", "interaction_error"}

    def test_a_perfect_proxy_is_one(self) -> None:
        swept, (layers, pairs) = made_up(), self._frames(8)
        means = np.array([column(swept, skip(8, [i])).mean() for i in range(8)])
        chosen = (layers["metric"] == "block_influence") & (layers["unit"] == "block")
        layers.loc[chosen, "value"] = np.exp(means)
        first = next(row for row in proxies(swept, layers, pairs, Resampler(40)) if row["proxy"] == "block_influence")
        assert first["value"] == pytest.approx(1)
        assert first["ci_high"] <= 1 + 1e-12

    def test_ties_share_their_rank(self) -> None:
        swept, (layers, pairs) = made_up(), self._frames(8)
        layers["value"] = (layers["value"] * 3).round()
        skips = np.array([column(swept, skip(8, [i])).mean() for i in range(8)])
        cheap = layers.query("metric == 'update_ratio' and unit == 'block'").sort_values("layer")["value"]
        assert cheap.nunique() < len(cheap)
        found = next(row for row in proxies(swept, layers, pairs, Resampler(40)) if row["proxy"] == "update_ratio")
        assert found["value"] == pytest.approx(stats.spearmanr(cheap, skips).statistic)


class Plain(nn.Module):
    """A language model whose blocks have nothing that is called attention or MLP."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(96, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(16, 96)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TestRefusals:
    @pytest.mark.parametrize(
        ("made", "options", "message"),
        [
            ([], {}, "no schedule"),
            ([""], {}, "empty"),
            (["0-2", "0 1 ("], {}, "at character 6"),
            (["0-7"], {}, "block 3"),
            (["0 (1a+2a) (1m+2m)"], {"combine": "branch-sum"}, "post-LN"),
            (["0 (1+2)"], {"combine": "branch-sum"}, "whole blocks"),
            (["0 (1+2)"], {"combine": "product"}, "product"),
            (["0 2"], {"score_positions": 0.0}, "score-positions 0.0"),
            (["0 2"], {"score_positions": 1.5}, "score-positions 1.5"),
            (["0 2"], {"score_positions": float("nan")}, "score-positions nan"),
            (["0 2"], {"batch_size": 0}, "batch size is 0"),
            ([merge(5, [3, 4])], {}, "block 3"),
        ],
    )
    def test_are_one_line(self, made: list[Any], options: dict[str, Any], message: str) -> None:
        with pytest.raises(UsageError, match=message) as caught:
            run(build("llama"), made, **options)
        assert "\n" not in str(caught.value)
        assert caught.value.exit_code == 2

    @pytest.mark.parametrize("text", ["0 1a 2", "0 (1a+2a) (1m+2m)", "0 (1m+1a) 2"])
    def test_sublayers_of_a_model_whose_branches_were_not_found(self, text: str) -> None:
        with pytest.raises(UsageError, match=r"no (attention|mlp) branch was found in block 1") as caught:
            run(Plain(), [text])
        assert "\n" not in str(caught.value)
        assert value(run(Plain(), ["0 2"]), "0 2", "kl") > 0, "whole blocks can be changed all the same"

    def test_averaged_weights_of_blocks_that_are_not_alike(self) -> None:
        model = Plain()
        model.blocks[1] = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16))
        assert value(run(model, ["(0+1) 2"]), "(0+1) 2", "kl") > 0
        with pytest.raises(DepthprobeError, match="averaged weights") as caught:
            run(model, ["(0+1) 2"], combine="weights")
        assert "\n" not in str(caught.value)
