"""The lab's model: what no position may see, what is refused, what survives a save, what transformers knows of it."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

import depthprobe
from depthprobe.errors import UsageError
from depthprobe.lab.config import INITIALISATIONS, NORMS, PAIRS, PLACEMENTS, LabConfig
from depthprobe.lab.model import LabForCausalLM, LabForMaskedLM, LabModel
from depthprobe.lab.parameters import parameter_difference, parameters_by_part

VOCAB, WIDTH, DEPTH, TOKENS = 40, 16, 4, 10
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
IDS = torch.randint(VOCAB, (3, TOKENS), generator=torch.Generator().manual_seed(0))

# Every option at least once, and those that meet in the code together
OPTIONS: dict[str, dict[str, Any]] = {
    **{f"{p} {n}": {"placement": p, "norm": n} for p, n in product(PLACEMENTS, ("layernorm", "rmsnorm"))},
    **{f"residual {p}": {"placement": p, "residual_attention": True, "qk_norm": True} for p in PLACEMENTS},
    "scaled pre": {"layernorm_scaling": True},
    "scaled sandwich": {"placement": "sandwich", "layernorm_scaling": True},
    "gpt2": {"initialisation": "gpt2", "tie_word_embeddings": True},
    "admin": {"placement": "post", "initialisation": "admin"},
    **{f"pairs of {k}, {p}": {"placement": p, "parallel_pairs": k} for p, k in product(PLACEMENTS, PAIRS[1:])},
    "pairs with scores": {"parallel_pairs": "blocks", "residual_attention": True},
    "pairs of sublayers with scores": {"parallel_pairs": "sublayers", "residual_attention": True, "placement": "post"},
    "pairs, admin": {"parallel_pairs": "sublayers", "placement": "post", "initialisation": "admin"},
}
BOTH_WAYS: dict[str, dict[str, Any]] = {
    **{f"{p} {n}": {"placement": p, "norm": n} for p, n in product(("pre", "post", "branch"), NORMS)},
    "residual": {"residual_attention": True},
}


def build(**options: Any) -> Any:
    """A tiny model, none of whose weights is accidentally 0 or 1."""
    torch.manual_seed(0)
    config = LabConfig(**{**SMALL, **options})
    model = LabForCausalLM(config) if config.causal else LabForMaskedLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn(weight.shape)
    return model


def seen(model: Any, position: int, **inputs: Any) -> Tensor:
    """How much the logits at one position depend on the embedding at each, `[batch, tokens]`."""
    rows = model.get_input_embeddings()(IDS).detach().requires_grad_()
    logits = model(inputs_embeds=rows, **inputs).logits
    weights = torch.randn(logits.shape[-1], generator=torch.Generator().manual_seed(1))
    (logits[:, position] @ weights).sum().backward()
    return rows.grad.norm(dim=-1)


class TestWhatAPositionSees:
    @pytest.mark.parametrize("training", [True, False])
    @pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
    def test_no_later_position(self, options: dict[str, Any], training: bool) -> None:
        model = build(**options).train(training)
        for position in (0, 6, TOKENS - 1):
            depends = seen(model, position)
            assert torch.all(depends[:, position + 1 :] == 0)
            assert torch.all(depends[:, : position + 1] > 0)

    @pytest.mark.parametrize("training", [True, False])
    @pytest.mark.parametrize("options", BOTH_WAYS.values(), ids=BOTH_WAYS)
    def test_every_position_in_the_bidirectional_model(self, options: dict[str, Any], training: bool) -> None:
        assert torch.all(seen(build(causal=False, **options).train(training), 4) > 0)

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("options", [{}, {"residual_attention": True}])
    def test_padding_is_not_seen(self, options: dict[str, Any], causal: bool) -> None:
        model = build(causal=causal, **options)
        mask = torch.ones(3, TOKENS, dtype=torch.long)
        mask[1, 7:], mask[2, :3] = 0, 0
        full, depends = seen(model, 6), seen(model, 6, attention_mask=mask)
        assert torch.allclose(depends[0], full[0], rtol=1e-4)
        assert torch.all(depends[2, :3] == 0)
        assert torch.all(depends[1, 7:] == 0)
        assert torch.all(depends[1, :7] > 0)
        alone = model(IDS[1:2, :7]).logits
        assert torch.allclose(model(IDS, attention_mask=mask).logits[1, :7], alone[0], atol=1e-5)
        assert torch.isfinite(model(IDS, attention_mask=mask).logits).all()

    def test_statistics_of_a_batch_leak_in_training(self) -> None:
        """Why BatchNorm and InstanceNorm may not be causal: shown where nothing else mixes positions."""
        for norm in ("batchnorm", "instancenorm"):
            model = build(norm=norm, causal=False)
            for block in model.model.blocks:
                block.attention.output.weight.data.zero_()
            assert torch.all(seen(model.train(), 4)[:, 5:] > 0)
            depends = seen(model.eval(), 4)[:, 5:]
            assert torch.all(depends == 0) if norm == "batchnorm" else torch.all(depends > 0)


class TestForward:
    @pytest.mark.parametrize("options", [{}, {"placement": "post", "qk_norm": True}, {"causal": False}])
    def test_attention_is_the_same_with_its_scores_written_out(self, options: dict[str, Any]) -> None:
        model = build(**options)
        fused = model(IDS).logits
        model.set_attn_implementation("eager")
        written = model(IDS).logits
        assert not torch.equal(fused, written)
        assert torch.allclose(fused, written, atol=1e-5)

    @pytest.mark.parametrize("options", [*OPTIONS.values(), {"causal": False, "norm": "batchnorm"}])
    def test_runs_in_half_precision(self, options: dict[str, Any]) -> None:
        wanted = float(build(**options)(IDS, labels=IDS).loss.detach())
        model = build(**options)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(IDS, labels=IDS).loss
        loss.backward()
        assert all(torch.isfinite(weight.grad).all() for weight in model.parameters() if weight.grad is not None)
        assert float(loss.detach()) == pytest.approx(wanted, rel=0.1)
        assert float(model.bfloat16()(IDS, labels=IDS).loss.detach()) == pytest.approx(wanted, rel=0.1)

    def test_residual_attention_adds_the_scores_of_the_block_before(self) -> None:
        model = build(residual_attention=True, num_hidden_layers=2, placement="none")
        first, second = model.model.blocks
        x = model.model.token_embedding(IDS) + model.model.position_embedding.weight[:TOKENS]

        def heads(block: Any, y: Tensor) -> list[Tensor]:
            return [t.view(3, TOKENS, 2, WIDTH // 2).transpose(1, 2) for t in block.attention.qkv(y).chunk(3, dim=-1)]

        before = torch.zeros(3, 2, TOKENS, TOKENS)
        later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
        for block in (first, second):
            query, key, value = heads(block, x)
            before = before + query @ key.mT / (WIDTH // 2) ** 0.5
            mixed = before.masked_fill(later, -torch.inf).softmax(-1) @ value
            x = x + block.attention.output(mixed.transpose(1, 2).reshape(x.shape))
            x = x + block.mlp.outer(F.gelu(block.mlp.inner(x)))
        assert torch.allclose(model(IDS).logits, model.lm_head(x), atol=1e-4)

    def test_loss_is_that_of_the_next_token(self) -> None:
        model = build()
        out = model(input_ids=IDS, labels=IDS)
        chance = out.logits[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None])
        assert torch.allclose(out.loss, -chance.mean())
        ignored = IDS.clone()
        ignored[:, 5:] = -100
        chance = out.logits[:, :4].log_softmax(-1).gather(-1, IDS[:, 1:5, None])
        assert torch.allclose(model(IDS, labels=ignored).loss, -chance.mean())

    def test_loss_of_the_masked_model_is_that_of_the_labels(self) -> None:
        model = build(causal=False)
        labels = torch.full_like(IDS, -100)
        labels[:, 3] = IDS[:, 3]
        out = model(IDS, labels=labels)
        assert torch.allclose(out.loss, F.cross_entropy(out.logits[:, 3], IDS[:, 3]))


class TestParameters:
    def test_placements_differ_by_their_norms_alone(self) -> None:
        pre, norm = LabConfig(**SMALL), 2 * WIDTH
        wanted = {"post": -1, "branch": 0, "sandwich": 2 * DEPTH, "deepnorm": -1, "none": -2 * DEPTH - 1}
        for placement, norms in wanted.items():
            found = parameter_difference(pre, LabConfig(**SMALL, placement=placement))
            assert found == ({"norms": norms * norm} if norms else {}), placement

    @pytest.mark.parametrize(
        ("options", "wanted"),
        [
            ({"residual_attention": True}, {}),
            ({"parallel_pairs": "blocks"}, {}),
            ({"parallel_pairs": "sublayers"}, {}),
            ({"norm": "rmsnorm"}, {"norms": -(2 * DEPTH + 1) * WIDTH}),
            ({"tie_word_embeddings": True}, {"head": -VOCAB * WIDTH}),
            (
                {"placement": "post", "initialisation": "admin"},
                {"norms": -2 * WIDTH, "gains": 2 * DEPTH * WIDTH},
            ),
            ({"placement": "post", "parallel_pairs": "sublayers"}, {"norms": -2 * WIDTH * (DEPTH + 1)}),
        ],
    )
    def test_differences_are_stated(self, options: dict[str, Any], wanted: dict[str, int]) -> None:
        config = LabConfig(**SMALL, **options)
        assert parameter_difference(LabConfig(**SMALL), config) == wanted
        assert sum(parameters_by_part(config).values()) == LabForCausalLM(config).num_parameters()


class TestSaved:
    @pytest.mark.parametrize(
        "options",
        [*OPTIONS.values(), *({**o, "causal": False} for o in BOTH_WAYS.values())],
        ids=[*OPTIONS, *(f"bidirectional {name}" for name in BOTH_WAYS)],
    )
    def test_comes_back_to_the_bit(self, options: dict[str, Any], tmp_path: Path) -> None:
        model = build(**options).train()
        model(IDS)  # moves BatchNorm's running statistics
        model.eval().save_pretrained(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} >= {"model.safetensors", "config.json"}
        auto = AutoModelForCausalLM if model.config.causal else AutoModelForMaskedLM
        again = auto.from_pretrained(tmp_path)
        assert type(again) is type(model)
        kept, read = model.state_dict(), again.state_dict()
        assert kept.keys() == read.keys()
        assert all(torch.equal(kept[name], read[name]) for name in kept)
        wanted, found = model.config.to_dict(), again.config.to_dict()
        assert {name: found[name] for name in {**SMALL, **options}} == {**SMALL, **options}
        assert wanted.keys() - found.keys() == set()
        assert torch.equal(model(IDS).logits, again(IDS).logits)

    def test_without_a_head(self, tmp_path: Path) -> None:
        model = build()
        model.save_pretrained(tmp_path)
        again = AutoModel.from_pretrained(tmp_path)
        assert type(again) is LabModel
        assert torch.equal(again(IDS).last_hidden_state, model.model(IDS).last_hidden_state)

    def test_in_bfloat16(self, tmp_path: Path) -> None:
        model = build().bfloat16()
        model.save_pretrained(tmp_path)
        checkpoint = depthprobe.load(tmp_path)
        assert checkpoint.dtype is torch.bfloat16
        assert torch.equal(checkpoint.model(IDS).logits, model(IDS).logits)
        assert checkpoint.max_positions == 16
        assert checkpoint.vocab_size == VOCAB

    @pytest.mark.parametrize(
        "imports",
        [
            "import depthprobe, sys; assert 'transformers' not in sys.modules; from transformers import *",
            "from transformers import AutoModelForCausalLM; import depthprobe",
            "from depthprobe.lab import LabForCausalLM; from transformers import AutoModelForCausalLM",
        ],
    )
    def test_transformers_opens_it_once_depthprobe_is_imported(self, imports: str, tmp_path: Path) -> None:
        build().save_pretrained(tmp_path)
        code = f"{imports}\nprint(type(AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})).__name__)"
        code = code.replace("import *", "import AutoModelForCausalLM")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.stdout.strip() == "LabForCausalLM", done.stderr


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"num_attention_heads": 3}, "a width of 16 cannot be divided among 3 heads"),
            ({"num_hidden_layers": 0}, "num_hidden_layers=0; expected a whole number of at least 1"),
            ({"hidden_size": 1.5}, "hidden_size=1.5"),
            ({"vocab_size": True}, "vocab_size=True"),
            ({"mlp_ratio": 0.0}, "mlp_ratio=0.0"),
            ({"norm_eps": 0.0}, "norm_eps=0.0"),
            ({"placement": "peri"}, "placement='peri'; expected pre, post, branch, sandwich, deepnorm, none"),
            ({"norm": "groupnorm"}, "norm='groupnorm'"),
            ({"initialisation": "he"}, "initialisation='he'; expected xavier, gpt2, admin"),
            ({"parallel_pairs": "layers"}, "parallel_pairs='layers'; expected an empty string, blocks, sublayers"),
            ({"norm": "instancenorm"}, "norm='instancenorm' in a causal model: its statistics see later positions"),
            ({"norm": "batchnorm"}, "norm='batchnorm' in a causal model"),
            ({"layernorm_scaling": True, "placement": "post"}, "placement='post', where no norm stands before"),
            ({"initialisation": "admin"}, "initialisation='admin' with placement='pre'; expected placement post"),
            ({"parallel_pairs": "blocks", "num_hidden_layers": 3}, "with 3 blocks; expected an even number"),
        ],
    )
    def test_in_one_line(self, options: dict[str, Any], words: str) -> None:
        with pytest.raises(UsageError) as error:
            LabConfig(**{**SMALL, **options})
        assert words in str(error.value)
        assert "\n" not in str(error.value)
        config = LabConfig(**SMALL)
        for name, value in options.items():
            setattr(config, name, value)
        with pytest.raises(UsageError):
            LabModel(config)

    def test_the_other_head(self) -> None:
        with pytest.raises(UsageError, match="LabForCausalLM with causal=False; expected causal=True, LabForMaskedLM"):
            LabForCausalLM(LabConfig(**SMALL, causal=False))
        with pytest.raises(UsageError, match="LabForMaskedLM with causal=True"):
            LabForMaskedLM(LabConfig(**SMALL))

    def test_inputs(self) -> None:
        model = build()
        with pytest.raises(UsageError, match="a sequence of 17 tokens; expected at most 16"):
            model(torch.zeros(1, 17, dtype=torch.long))
        with pytest.raises(UsageError, match="neither or both"):
            model()

    def test_every_choice_is_built_somewhere_here(self) -> None:
        tried = [{**SMALL, **options} for options in (*OPTIONS.values(), *BOTH_WAYS.values())]
        for name, choices in [("placement", PLACEMENTS), ("norm", NORMS), ("initialisation", INITIALISATIONS)]:
            default = getattr(LabConfig(), name)
            assert {options.get(name, default) for options in tried} == set(choices)
