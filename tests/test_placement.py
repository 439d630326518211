"""Weights that are fetched while blocks run: the same numbers, as many bytes as the order of blocks tells, and no more
memory than was allowed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from by_hand import corpus_of, deep
from families import build, ids, shake
from torch import nn

import depthprobe
from depthprobe import Checkpoint, Report, cli, load, offload
from depthprobe.ablation import default_schedules
from depthprobe.ablations import outer
from depthprobe.ablations.batch import Batch
from depthprobe.ablations.kinds import KINDS, controls, schedules
from depthprobe.ablations.outer import Plan, Walk
from depthprobe.ablations.run import SweepSettings, sweep
from depthprobe.ablations.schedule import Schedule, parse
from depthprobe.ablations.staging import find_stages
from depthprobe.ablations.sweep import Trie, planned_evaluations, run_batch
from depthprobe.ablations.units import Units
from depthprobe.corpus import Corpus
from depthprobe.errors import CheckpointError, UsageError
from depthprobe.fingerprint import fingerprint
from depthprobe.fresh import fresh_twin
from depthprobe.gradient import GradientSettings, run_gradients
from depthprobe.lab import LabConfig
from depthprobe.lab.model import LabForCausalLM
from depthprobe.measure import Settings, measure
from depthprobe.offload import OnDisk, Window, allowed
from depthprobe.placement import Placing
from depthprobe.prepare import prepare
from depthprobe.verify import Anatomy, open_stream

NAMES = ("llama", "gpt2", "bert", "opt-post", "falcon", "realformer")
IDS = ids(5, 20)
DISK = {"": "disk"}
FEW = {"batch_size": 2, "gradient_tokens": 0, "depth_tokens": 0, "tokens": IDS.numel()}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device on this machine")


def model_of(name: str) -> nn.Module:
    """A tiny model of four blocks; `realformer` hands attention scores from block to block, and embeds positions."""
    if name == "realformer":
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 96}
        return shake(LabForCausalLM(LabConfig(**sizes, max_position_embeddings=64, residual_attention=True)))
    return deep(name, 4) if name in ("llama", "bert", "opt-post") else build(name)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name in NAMES:
        model_of(name).save_pretrained(root / name)
    return {name: root / name for name in NAMES}


def pair(folder: Path, data: Any = IDS, **loading: Any) -> tuple[Anatomy, Anatomy, Corpus]:
    """The model in memory, and on disk."""
    _, corpus, inside = prepare(folder, data, device="cpu", **loading)
    return inside, prepare(folder, data, device_map=DISK, **loading)[2], corpus


def same(one: Report, other: Report, bound: float = 1e-5) -> None:
    for name in ("layers", "pairs", "ablations"):
        first, second = getattr(one, name), getattr(other, name)
        words = [column for column in first if first[column].dtype.kind not in "f"]
        pd.testing.assert_frame_equal(first[words], second[words])
        for column in ("value", "ci_low", "ci_high"):
            np.testing.assert_allclose(
                second[column], first[column], rtol=bound, atol=bound, err_msg=f"{name} {column}"
            )
    assert len(one.layers) > 100
    for key in ("cross_share", "growth_rate", "growth_power"):
        assert one.growth[key] == pytest.approx(other.growth[key], rel=bound, abs=bound, nan_ok=True)


def on_disk(folder: Path, blocks: str) -> tuple[int, int]:
    """Bytes of all weights inside of the list of blocks and outside of it, as the file has them."""
    sizes: Counter[bool] = Counter()
    with (folder / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    for name, tensor in header.items():
        if name != "__metadata__":
            start, stop = tensor["data_offsets"]
            sizes[name.startswith(f"{blocks}.")] += stop - start
    return sizes[True], sizes[False]


class TestTheSameNumbers:
    @pytest.mark.parametrize("name", NAMES)
    def test_of_analyze(self, folders: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Everything on disk; and again with room for so little that the text is divided and states go to disk."""
        inside = depthprobe.analyze(folders[name], IDS, device="cpu", **FEW)
        outside = depthprobe.analyze(folders[name], IDS, device_map=DISK, **FEW)
        same(inside, outside)
        assert outside.cost["fetched"]["chunks"] == outside.merging["fetched"]["chunks"] == 1
        assert "fetched" not in inside.cost
        assert inside.model["fingerprint"] == outside.model["fingerprint"]
        assert inside.model["parameters"] == outside.model["parameters"]
        monkeypatch.setattr(offload, "MEMORY", 100_000)
        monkeypatch.setattr(OnDisk, "append", spied := _Spy(OnDisk.append))
        little = depthprobe.analyze(folders[name], IDS, device_map=DISK, **FEW)
        same(inside, little)
        assert little.cost["fetched"]["chunks"] == 3
        assert little.merging["fetched"]["chunks"] == 5
        assert spied.calls == inside.model["blocks"] + 1
        monkeypatch.setattr(offload, "MEMORY", 1000)
        tight = depthprobe.analyze(folders[name], IDS, device_map=DISK, **FEW | {"batch_size": "auto"})
        assert any("than --max-memory leaves" in note for note in tight.notes)
        assert any("than --max-memory allows" in note for note in tight.merging["notes"])
        assert not any("--max-memory" in note for note in (*outside.notes, *outside.merging["notes"]))
        for part in (little.cost, little.merging, outside.cost, outside.merging):
            assert part["fetched"]["bytes"] == part["fetched"]["planned"]

    def test_in_another_dtype(self, folders: dict[str, Path], tmp_path: Path) -> None:
        """A half-precision checkpoint in float32, and the other way round: converted when it is fetched."""
        build("llama").to(torch.bfloat16).save_pretrained(tmp_path)
        for folder, dtype in ((tmp_path, "float32"), (folders["llama"], "bfloat16"), (tmp_path, "auto")):
            inside, outside, corpus = pair(folder, dtype=dtype)
            assert inside.stream.checkpoint.dtype == outside.stream.checkpoint.dtype
            one, other = (measure(anatomy, corpus, Settings(batch_size=2)) for anatomy in (inside, outside))
            assert one.floors == other.floors
            for key, values in one.means.values.items():
                np.testing.assert_allclose(other.means.values[key], values, rtol=1e-5, atol=1e-5)
        assert other.floors, "the report of a checkpoint in half precision states what rounding alone gives"

    def test_with_a_part_in_memory(self, folders: dict[str, Path]) -> None:
        """Embedding, two blocks and the head stay; what is there is not fetched."""
        names = {f"model.layers.{i}": "disk" if i > 1 else "cpu" for i in range(4)}
        rest = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
        _, corpus, inside = prepare(folders["llama"], IDS, device="cpu")
        _, _, outside = prepare(folders["llama"], IDS, device_map=json.dumps({**names, **rest}))
        one, other = (sweep(anatomy, corpus, default_schedules(4)) for anatomy in (inside, outside))
        for metric, values in one.effects.items():
            np.testing.assert_allclose(other.effects[metric], values, atol=1e-5)
        assert other.fetched is not None
        assert other.fetched.bytes == on_disk(folders["llama"], "model.layers")[0] // 2

    def test_of_a_model_that_was_dispatched_before(self, folders: dict[str, Path]) -> None:
        """From Python, by transformers alone; and opened again, when its tied weights have come apart."""
        model = transformers.AutoModelForCausalLM.from_pretrained(folders["gpt2"], device_map=DISK)
        inside = depthprobe.analyze(folders["gpt2"], IDS, device="cpu", **FEW)
        for _ in range(2):
            report = depthprobe.analyze(model, IDS, **FEW)
            same(inside, report)
            assert report.cost["fetched"]["bytes"] == report.cost["fetched"]["planned"] > 0
            assert report.model["parameters"] == inside.model["parameters"]
            assert report.model["fingerprint"] == inside.model["fingerprint"]

    def test_of_stages(self, folders: dict[str, Path]) -> None:
        inside, outside, corpus = pair(folders["llama"])
        one, other = (find_stages(anatomy, corpus) for anatomy in (inside, outside))
        assert [point.schedule for point in other.points] == [point.schedule for point in one.points]
        assert other.unigram_kl == pytest.approx(one.unigram_kl, abs=1e-5)
        assert other.evaluations == one.evaluations

    def test_of_a_sweep_that_goes_on(self, folders: dict[str, Path], tmp_path: Path, monkeypatch: Any) -> None:
        """The folder says how large a batch was, whatever memory allows now."""
        _, corpus, anatomy = prepare(folders["llama"], IDS, device_map=DISK)
        made = default_schedules(4)
        monkeypatch.setattr(offload, "MEMORY", 60_000)
        tight = prepare(folders["llama"], IDS, device_map=DISK)[2]
        first = sweep(tight, corpus, made, resume=tmp_path)
        assert len(list(tmp_path.glob("*.npz"))) > 2
        next(tmp_path.glob("*.npz")).unlink()
        again = sweep(anatomy, corpus, made, resume=tmp_path)
        assert again.fetched is not None
        assert again.fetched.chunks == 1
        assert again.evaluations == first.evaluations
        for metric, values in first.effects.items():
            np.testing.assert_array_equal(again.effects[metric], values)


class TestWhatIsFetched:
    @pytest.mark.parametrize(
        ("name", "blocks"), [("llama", "model.layers"), ("gpt2", "transformer.h"), ("opt-post", "model.decoder.layers")]
    )
    def test_each_block_once_a_chunk(self, folders: dict[str, Path], name: str, blocks: str) -> None:
        """Told from the file alone: the blocks once, the rest once for the embedding and once for the head."""
        placed = load(folders[name], device_map=DISK)
        report = depthprobe.analyze(placed, IDS, **FEW, ablations=False)
        inner, rest = on_disk(folders[name], blocks)
        if build(name).config.tie_word_embeddings:
            rest += build(name).get_input_embeddings().weight.nbytes  # by each of the two that have it
        count = report.model["blocks"]
        made = default_schedules(count, post_ln=name == "opt-post")
        shared, plain = planned_evaluations(made, count)
        merging = depthprobe.ablate(placed, made, IDS, batch_size=2, tokens=IDS.numel()).merging
        for fetched in (report.cost["fetched"], merging["fetched"]):
            assert fetched["bytes"] == fetched["planned"] == inner + 2 * rest
            assert fetched["chunks"] == 1
        assert merging["evaluations"] == 3 * shared, "three batches"
        assert merging["plain_evaluations"] == 3 * plain
        # The blocks are all of one size: a loop with batches outside fetches one for every evaluation.
        assert report.cost["fetched"]["batch_outer"] == 3 * (inner // count * (3 * count - 2) + 2 * rest)
        assert merging["fetched"]["batch_outer"] == 3 * (inner // count * shared + 2 * rest)

    @pytest.mark.parametrize("name", ["llama", "opt-post"])
    def test_a_loop_with_batches_outside(self, folders: dict[str, Path], name: str) -> None:
        """What it is said to fetch is what it does fetch: the walk for weights in memory, on weights on disk."""
        _, corpus, anatomy = prepare(folders[name], IDS, device_map=DISK)
        made = [*default_schedules(4, post_ln=anatomy.post_ln), parse("0 (1+2+3)", "weights"), parse("3 0a 0m 1")]
        found = sweep(anatomy, corpus, made, SweepSettings(batch_size=2))
        assert found.fetched is not None
        held = anatomy.stream.checkpoint.offload
        assert held is not None
        before, units = held.fetched, Units(anatomy)
        with torch.no_grad():
            for start in (0, 2, 4):
                with held.outside():
                    batch = Batch(units, corpus, slice(start, min(start + 2, 5)), 1.0, 0, None, None)
                effects, _ = run_batch(units, batch.entry, Trie.of(made), lambda last: None, batch.direction)
                with held.outside():
                    pass
        assert held.fetched - before == found.fetched.batch_outer
        assert found.fetched.batch_outer > 10 * found.fetched.bytes
        last = [effects[i]["state_distance"][0] for i in range(len(made))]
        np.testing.assert_allclose(found.effects["state_distance"][4], last, atol=1e-6)

    def test_never_more_blocks_than_the_window(self, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        """Two blocks at most are there at any time, and none is left behind."""
        _, corpus, anatomy = prepare(folders["llama"], IDS, device_map=DISK)
        model, blocks = anatomy.stream.checkpoint.model, anatomy.stream.blocks.modules

        def there() -> int:
            return sum(any(p.device.type != "meta" for p in block.parameters()) for block in blocks)

        seen: list[int] = []
        real = Units.unit
        monkeypatch.setattr(Units, "unit", lambda *args: (seen.append(there()), real(*args))[1])
        sweep(anatomy, corpus, [*default_schedules(4), parse("3 2 1 0"), parse("0 0 3 3 1")])
        assert max(seen) == outer.WINDOW
        assert {p.device.type for p in model.parameters()} == {"meta"}

    def test_nothing_stays_after_an_error(self, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        _, corpus, anatomy = prepare(folders["llama"], IDS, device_map=DISK)
        monkeypatch.setattr(Units, "stage", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sweep(anatomy, corpus, default_schedules(4))
        checkpoint = anatomy.stream.checkpoint
        assert {p.device.type for p in checkpoint.model.parameters()} == {"meta"}
        assert checkpoint.offload is not None
        before = checkpoint.offload.fetched
        with checkpoint.outside():
            pass
        assert checkpoint.offload.fetched - before == checkpoint.offload.outside_size, "hooks work as before"


class TestThePlan:
    @pytest.mark.parametrize("blocks", [2, 5, 12])
    def test_of_the_default_sweep(self, blocks: int) -> None:
        """With controls and all, each block is fetched once, from the first to the last."""
        for post_ln in (False, True):
            plan = Plan.of(default_schedules(blocks, post_ln=post_ln), blocks)
            assert [visit.block for visit in plan.visits] == list(range(blocks))
            assert plan.fetched([10**i for i in range(blocks)]) == int("1" * blocks)

    def test_of_blocks_in_reverse(self) -> None:
        """5 4 3 2 1 0: the unmodified model goes up once, then each two neighbours are there together, going down."""
        plan = Plan.of([parse("5 4 3 2 1 0")], 6)
        visited = [visit.block for visit in plan.visits]
        assert visited[:6] == list(range(6))
        assert visited[6:] == [3, 2, 1, 0], "5 and 4 were there when the first pass ended"

    @pytest.mark.parametrize("name", ["llama", "bert", "neox"])
    @pytest.mark.parametrize("seed", [0, 1])
    def test_gives_what_the_walk_gives(self, name: str, seed: int) -> None:
        """Random schedules of every kind, on weights in memory: to the last bit, and as many evaluations as planned."""
        model, inputs = deep(name, 5, seed), ids(3, 16, seed)
        anatomy = open_stream(load(model, device="cpu"), inputs)
        made = _random_schedules(np.random.default_rng(seed), anatomy)
        units, corpus = Units(anatomy), corpus_of(inputs)
        batch = Batch(units, corpus, slice(0, 3), 1.0, seed, None, None)
        plan = Plan.of(made, 5)
        walk = Walk(units, batch.entry, plan, batch.direction)
        with torch.no_grad():
            expected, _ = run_batch(units, batch.entry, Trie.of(made), batch.reference, batch.direction)
            assert units.evaluations == planned_evaluations(made, 5)[0]
            most = 0
            for visit in plan.visits:
                walk.visit(visit)
                most = max(most, len(walk.states) + len(walk.outputs))
            found, _ = walk.effects(batch.reference)
        assert units.evaluations == 2 * planned_evaluations(made, 5)[0]
        assert most <= plan.waiting
        assert found.keys() == expected.keys() == set(range(len(made)))
        for index in found:
            for metric, values in expected[index].items():
                np.testing.assert_array_equal(found[index][metric], values, err_msg=f"{metric} of {made[index]}")

    def test_a_window_lets_go_of_the_oldest(self) -> None:
        log: list[str] = []

        class Held:
            def __init__(self, block: int) -> None:
                self.block = block

            def __enter__(self) -> None:
                log.append(f"+{self.block}")

            def __exit__(self, *error: object) -> None:
                log.append(f"-{self.block}")

        with Window(Held, 2) as window:  # type: ignore[arg-type]
            for block in (0, 1, 2):
                window.fetch(block)
        assert log == ["+0", "+1", "-0", "+2", "-1", "-2"]


def _random_schedules(rng: np.random.Generator, anatomy: Anatomy) -> list[Schedule]:
    post = anatomy.post_ln
    kinds = [kind for kind in KINDS if not (kind == "parallel" and anatomy.blocks[0].branches[0].parallel)]
    made = schedules(5, tuple(kinds), span=3, seed=int(rng.integers(100))) + controls(5)
    made += [parse(" ".join(map(str, rng.permutation(5)[: rng.integers(1, 6)]))) for _ in range(6)]
    made += [parse("0 (1+2) 3-4", way) for way in ("mean", "weights")] + [parse("(0+2+4) 1 3", "weights")]
    made += [parse("0a 0m (1a+2a) (1m+2m) 3-4", "branch-sum" if post else "sum"), parse("0-4 0-4")]
    return list({(s.stages, s.combine if s.merges else ""): s for s in made}.values())


class _Spy:
    """Counts the calls of a method."""

    def __init__(self, method: Any) -> None:
        self.method, self.calls = method, 0

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        def call(*args: Any) -> Any:
            self.calls += 1
            return self.method(owner, *args)

        return call


class TestWhatIsAsked:
    def test_sizes(self) -> None:
        asked = Placing.of(None, "0=20GiB, cpu=3GB", None)
        assert asked == Placing("auto", {0: 20 << 30, "cpu": 3 * 10**9})
        assert Placing.of("sequential", {"cpu": "500MiB"}, Path("x")) == Placing("sequential", {"cpu": 500 << 20}, "x")
        assert Placing.of(None, None, None) is None

    @pytest.mark.parametrize(
        ("given", "word"),
        [
            ({"device_map": "nearby"}, "balanced"),
            ({"device_map": {}}, "balanced"),
            ({"device_map": "[1]"}, "balanced"),
            ({"max_memory": "cpu"}, "cpu=3GiB"),
            ({"max_memory": "cpu=lots"}, "cpu=lots"),
            ({"max_memory": "tpu=1GiB"}, "tpu"),
            ({"max_memory": {"cpu": 0}}, "more than 0"),
            ({"max_memory": {}}, "empty"),
            ({"max_memory": "cpu=1GiB", "device_map": {"": "disk"}}, "one of the two"),
            ({"device_map": "auto", "device": "cpu"}, "leave one"),
        ],
    )
    def test_what_makes_no_sense(self, folders: dict[str, Path], given: dict[str, Any], word: str) -> None:
        with pytest.raises(UsageError, match=word):
            load(folders["llama"], **given)

    def test_where_there_is_nothing_to_place(self, folders: dict[str, Path], tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="already in memory"):
            load(build("llama"), device_map="auto")
        (tmp_path / "model.gguf").write_bytes(b"GGUF")
        with pytest.raises(UsageError, match="transformers' format"):
            load(tmp_path / "model.gguf", max_memory="cpu=1GiB")

    def test_all_of_it_fits(self, folders: dict[str, Path]) -> None:
        """Then nothing is fetched, and the limit still bounds what is done at once."""
        model = load(folders["llama"], max_memory="cpu=64GiB")
        assert model.offload is not None
        assert model.in_memory
        assert model.offload.room > 30 << 30
        report = depthprobe.analyze(model, IDS, **FEW)
        assert "fetched" not in report.cost
        same(depthprobe.analyze(folders["llama"], IDS, device="cpu", **FEW), report)

    @pytest.mark.parametrize("name", NAMES)
    def test_of_every_kind(self, folders: dict[str, Path], name: str) -> None:
        """What a model takes is told from its configuration alone."""
        inside, limited = load(folders[name], device="cpu"), load(folders[name], max_memory="cpu=64GiB")
        assert fingerprint(limited.model, limited.offload) == fingerprint(inside.model)

    def test_too_little(self, folders: dict[str, Path]) -> None:
        with pytest.raises(CheckpointError, match=r"--max-memory cpu=100 MiB .* expected at least") as caught:
            load(folders["llama"], max_memory="cpu=100MiB")
        assert "largest blocks" in str(caught.value)

    def test_half_of_what_is_left_is_for_states(self, folders: dict[str, Path], monkeypatch: Any) -> None:
        """Of a made-up process: what it takes and two blocks go first; accelerate leaves room for one itself."""
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folders["llama"])
        inner, rest = on_disk(folders["llama"], "model.layers")
        largest, taken = max(inner // 4, rest // 2), 1 << 30
        monkeypatch.setattr("depthprobe.placement._taken", lambda device: taken)
        monkeypatch.setattr("depthprobe.placement.LEAST", 1)
        monkeypatch.setattr("depthprobe.placement.SUMS", 0)
        limit = taken + 2 * largest + 60_000
        asked = Placing("auto", {"cpu": limit})
        told, room = asked.arguments(AutoModelForCausalLM, config, None, False)
        assert room == 30_000
        assert told["max_memory"] == {"cpu": 30_000 + largest}
        roomy = Placing("auto", {"cpu": limit + 10**9})
        assert roomy.arguments(AutoModelForCausalLM, config, None, False)[1] >= 10**9 - inner - rest
        monkeypatch.setattr("depthprobe.placement.SUMS", (2 * largest + 40_000) / config.hidden_size**2)
        assert asked.arguments(AutoModelForCausalLM, config, None, False)[1] == 40_000, "for sums over kept states"

    def test_weights_that_have_to_be_written_anew(self, tmp_path: Path) -> None:
        """A pickled checkpoint cannot be fetched weight by weight."""
        model = build("llama")
        model.config.save_pretrained(tmp_path)
        model.config.architectures = ["LlamaForCausalLM"]
        model.config.save_pretrained(tmp_path)
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match="--offload-folder"):
            load(tmp_path, device_map=DISK)
        found = load(tmp_path, device_map=DISK, offload_folder=tmp_path / "weights")
        assert fingerprint(found.model, found.offload) == fingerprint(load(tmp_path, device="cpu").model)
        assert any((tmp_path / "weights").iterdir())


@pytest.fixture(scope="module")
def placed(folders: dict[str, Path]) -> Checkpoint:
    return load(folders["gpt2"], device_map=DISK)


class TestALimitThatTheWeightsFitInto:
    """What is in memory besides them is within the limit too."""

    def test_a_twin_needs_room(self, folders: dict[str, Path]) -> None:
        limited = load(folders["gpt2"], max_memory={"cpu": 64 << 30})
        assert limited.offload is not None
        assert not limited.offload.any
        fresh_twin(limited, 0)
        limited.offload.room = 1000
        with pytest.raises(UsageError, match=r"a random twin takes .* and --max-memory leaves 1000 bytes"):
            fresh_twin(limited, 0)

    def test_states_and_graphs_take_a_quarter(self, folders: dict[str, Path], monkeypatch: Any) -> None:
        limited, corpus, anatomy = prepare(folders["gpt2"], IDS, max_memory={"cpu": 64 << 30})
        assert limited.offload is not None
        limited.offload.room = 4_000_000
        assert allowed(1 << 40, limited.offload) == 1_000_000
        assert allowed(10, limited.offload) == 10
        assert allowed(1 << 40, None) == 1 << 40
        asked: list[int] = []
        monkeypatch.setattr("depthprobe.gradient.groups_that_fit", lambda *given: asked.append(given[-1]) or 0)
        run_gradients(anatomy, corpus, GradientSettings())
        assert asked == [1_000_000]


class TestWhatIsRefused:
    def test_gradients_and_depth(self, placed: Checkpoint) -> None:
        for verb in (depthprobe.gradients, depthprobe.effective_depth):
            with pytest.raises(UsageError, match="offloaded; expected all weights in memory"):
                verb(placed, IDS, tokens=IDS.numel())

    def test_analyze_says_what_it_left_out(self, placed: Checkpoint) -> None:
        report = depthprobe.analyze(placed, IDS, batch_size=2, tokens=IDS.numel(), ablations=False)
        said = " ".join(report.notes)
        assert all(f"{what} left out" in said for what in ("Gradients were", "Effective depth was", "computation were"))
        assert not report.gradients
        assert report.depth.empty
        assert not report.phases

    @pytest.mark.parametrize("command", ["depth", "gradients", "prune"])
    def test_on_the_command_line(
        self, folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
    ) -> None:
        np.save(tmp_path / "ids.npy", IDS.numpy())
        more = ["--drop", "1"] if command == "prune" else []
        where = [str(folders["gpt2"]), "--out", str(tmp_path / "out"), "--data", str(tmp_path / "ids.npy")]
        with pytest.raises(SystemExit) as stopped:
            cli.main([command, *where, *more, "--device-map", json.dumps(DISK)])
        assert stopped.value.code == 2
        said = capsys.readouterr().err
        assert "offloaded; expected all weights in memory" in said
        assert "measuring first" not in said  # what would be thrown away

    def test_a_random_twin_is_no_part_of_it(self, folders: dict[str, Path]) -> None:
        """Its fingerprint is of its own weights, though those of the checkpoint were placed."""
        placed = load(folders["gpt2"], device_map=DISK)
        twins = [fresh_twin(placed, seed) for seed in (0, 1)]
        assert len({fingerprint(twin.model, twin.offload) for twin in (placed, *twins)}) == 3


def test_the_command_line_says_how_many_bytes(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("depthprobe.report.figures.render", lambda *_, **__: b"")
    np.save(tmp_path / "ids.npy", IDS.numpy())
    where = [str(folders["llama"]), "--out", str(tmp_path / "out"), "--data", str(tmp_path / "ids.npy")]
    for command in (["ablate", "--batch-size", "2"], ["inspect"]):
        options = where if command[0] == "ablate" else where[:1]
        with pytest.raises(SystemExit) as stopped:
            cli.main([*command, *options, "--device-map", json.dumps(DISK)])
        assert stopped.value.code == 0
    screen = capsys.readouterr().out
    report = Report.load(tmp_path / "out")
    assert Report.from_json(report.to_json()).merging["fetched"] == report.merging["fetched"]
    fetched = report.merging["fetched"]
    assert fetched["bytes"] == fetched["planned"], "what tells the weights apart is no part of the work"
    words = f"{fetched['bytes'] / 1024:.3g} KiB in 1 chunk of the text"
    assert words in (tmp_path / "out" / "report.html").read_text()
    assert "Fetched" in screen
    assert "weights are placed: " in screen


def test_states_on_disk(tmp_path: Path) -> None:
    held = OnDisk(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        held.append(torch.zeros(2, 3, dtype=dtype))
    held[1][torch.tensor([1])] = torch.tensor([[1.5, 2, 3]], dtype=torch.bfloat16)
    assert held[1].tolist() == [[0, 0, 0], [1.5, 2, 3]]
    assert held[0].tolist() == [[0, 0, 0]] * 2
    assert [x.dtype for x in held] == [torch.float32, torch.bfloat16]
    with pytest.raises(IndexError):
        held[2]


ANALYZE = """
import json, pathlib, sys, torch
import depthprobe
torch.set_num_threads(1)
rest = {"gradient_tokens": 0, "depth_tokens": 0, "tokens": 10**9, "dtype": "float32"}
report = depthprobe.analyze(sys.argv[1], torch.tensor(json.loads(sys.argv[2])), **rest, **json.loads(sys.argv[3]))
pathlib.Path(sys.argv[4]).write_text(report.to_json())
"""
# A process of its own, since what Linux says of a child counts what it was before it became another program.
PEAK = """
import os, sys
child = os.spawnv(os.P_NOWAIT, sys.argv[1], sys.argv[1:])
_, status, used = os.wait4(child, 0)
print(status, used.ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "wait4"), reason="peak memory is measured by wait4")
def test_peak_memory_from_outside(tmp_path: Path) -> None:
    """A Llama whose float32 weights are larger than all the memory that the process may take: measurements and sweep.

    Its file is in bfloat16, so that every weight is converted when it is opened and when it is fetched.
    """
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=1024, intermediate_size=6144, num_hidden_layers=11, num_attention_heads=16,
        num_key_value_heads=4, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    weights = 2 * (tmp_path / "model" / "model.safetensors").stat().st_size
    limit = 900 << 20
    assert weights > limit
    data = json.dumps(ids(2, 12, vocab=1000).tolist())
    reports = []
    for name, loading in (("inside", {"device": "cpu"}), ("outside", {"max_memory": f"cpu={limit >> 20}MiB"})):
        given = [str(tmp_path / "model"), data, json.dumps(loading), str(tmp_path / name)]
        command = [sys.executable, "-c", PEAK, sys.executable, "-c", ANALYZE, *given]
        ran = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        status, used = map(int, ran.stdout.split())
        assert status == 0, ran.stderr
        reports.append(Report.load(tmp_path / name))
        peak = used * (1 if sys.platform == "darwin" else 1024)
        print(f"{name}: {peak / 2**20:.0f} MiB, weights {weights / 2**20:.0f} MiB, limit {limit / 2**20:.0f} MiB")
    assert peak < limit
    same(*reports)
    for part in (reports[1].cost, reports[1].merging):
        assert part["fetched"]["bytes"] == part["fetched"]["planned"]
        assert part["fetched"]["bytes"] > 0.9 * weights


@pytest.mark.gpu
@needs_gpu
class TestOnAGpu:
    def test_it_is_used_without_a_flag(self, folders: dict[str, Path]) -> None:
        """And gives the CPU's numbers."""
        report = depthprobe.analyze(folders["llama"], IDS, **FEW)
        assert report.model["device"].startswith("cuda")
        same(depthprobe.analyze(folders["llama"], IDS, device="cpu", **FEW), report, 1e-4)

    def test_weights_that_are_fetched_to_it(self, folders: dict[str, Path]) -> None:
        names = {f"model.layers.{i}": "cpu" if i > 1 else 0 for i in range(4)} | {"model.layers.3": "disk"}
        rest = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), 0)
        report = depthprobe.analyze(folders["llama"], IDS, device_map={**names, **rest}, **FEW)
        assert report.model["device"].startswith("cuda")
        assert report.cost["fetched"]["bytes"] == report.cost["fetched"]["planned"] > 0
        same(depthprobe.analyze(folders["llama"], IDS, device="cpu", **FEW), report, 1e-4)

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees no second CUDA device on this machine")
    @pytest.mark.parametrize("name", ["llama", "bert", "opt-post"])
    def test_blocks_on_two(self, folders: dict[str, Path], name: str) -> None:
        """Norms, gains and means of weights that are called by themselves are where their block is."""
        few = {**FEW, "depth_tokens": 40, "gradient_tokens": 40}
        report = depthprobe.analyze(folders[name], IDS, device_map="balanced", **few)
        same(depthprobe.analyze(folders[name], IDS, device="cpu", **few), report, 1e-4)
        _, corpus, anatomy = prepare(folders[name], IDS, device_map="balanced")
        swept = sweep(anatomy, corpus, [parse("0 (1+2) 3", combine) for combine in ("weights", "mean")])
        assert all(np.isfinite(values).all() for values in swept.effects.values())
