"""Loading: every format gives the original's logits, a local path never asks the network, bad input is one line."""

from __future__ import annotations

import json
import os
import pickle
import socket
import struct
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from families import build
from torch import nn
from torch.nn import functional as F
from transformers import AutoTokenizer, BertConfig, GPT2Config, LlamaConfig

from depthprobe import conversions
from depthprobe.checkpoint import Checkpoint, _looks_like_path, load
from depthprobe.errors import CheckpointError, DepthprobeError, UsageError

WEIGHTS = Path(__file__).resolve().parents[1] / ".weights"
SMOLLM2 = WEIGHTS / "SmolLM2-135M-Instruct.Q4_1.gguf"
MINILM = WEIGHTS / "all-MiniLM-L6-v2"
IDS = torch.arange(24).reshape(2, 12)


def gpt2_config(**changes: object) -> GPT2Config:
    return GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=100, n_positions=64, **changes)


def bert_config(**changes: object) -> BertConfig:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return BertConfig(vocab_size=100, **{**sizes, **changes})


def llama_config(**changes: object) -> LlamaConfig:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaConfig(vocab_size=100, intermediate_size=48, max_position_embeddings=64, **{**sizes, **changes})


def random(cls: type, config: object) -> nn.Module:
    """A model whose every parameter is random: fresh biases are zero and norms one, which hides mistakes."""
    torch.manual_seed(0)
    model = cls(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture
def gpt2() -> nn.Module:
    return random(transformers.GPT2LMHeadModel, gpt2_config())


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every attempt to reach the network is recorded, and fails."""
    attempts: list[str] = []

    def refuse(*arguments: object, **_: object) -> None:
        attempts.append(repr(arguments))
        raise socket.gaierror(-3, "no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return attempts


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        out = model(input_ids=IDS.to(next(model.parameters()).device))
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def refused(spec: object, kind: type[DepthprobeError] = CheckpointError, **options: object) -> str:
    """The one line that refuses it."""
    with pytest.raises(DepthprobeError) as caught:
        load(spec, **options)  # type: ignore[arg-type]
    assert type(caught.value) is kind
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


def write_bin(model: nn.Module, folder: Path, shards: int = 1) -> None:
    """The legacy format, which transformers no longer writes."""
    model.config.architectures = [type(model).__name__]  # type: ignore[union-attr]
    model.config.save_pretrained(folder)  # type: ignore[union-attr, operator]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    if shards == 1:
        torch.save(weights, folder / "pytorch_model.bin")
        return
    names = [f"pytorch_model-{i + 1:05d}-of-{shards:05d}.bin" for i in range(shards)]
    places = {key: names[i % shards] for i, key in enumerate(weights)}
    for name in names:
        torch.save({key: weights[key] for key in weights if places[key] == name}, folder / name)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


# --- directories ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["safetensors", "sharded", "bin", "sharded bin"])
def test_directory_gives_the_original_logits(form: str, gpt2: nn.Module, tmp_path: Path, no_network: list[str]) -> None:
    folder = tmp_path / "my model"
    folder.mkdir()
    if "bin" in form:
        write_bin(gpt2, folder, shards=3 if "sharded" in form else 1)
    else:
        gpt2.save_pretrained(folder, max_shard_size="20KB" if form == "sharded" else "1GB")  # type: ignore[operator]
    assert (len(list(folder.glob("*-of-*"))) > 1) == ("sharded" in form)
    checkpoint = load(folder)
    assert torch.equal(logits(checkpoint.model), logits(gpt2))
    assert (checkpoint.format, checkpoint.name, checkpoint.objective) == ("directory", "my-model", "causal")
    assert (checkpoint.vocab_size, checkpoint.max_positions, checkpoint.inputs) == (100, 64, "ids")
    assert checkpoint.tokenizer is None
    assert checkpoint.notes == ()
    assert checkpoint.is_hf
    assert checkpoint.architecture == "GPT2LMHeadModel"
    assert checkpoint.parameters == sum(p.numel() for p in gpt2.parameters())
    assert not checkpoint.model.training
    assert no_network == []


@pytest.mark.parametrize("asked", ["auto", "fp32", "bfloat16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype(asked: str, stored: torch.dtype, gpt2: nn.Module, tmp_path: Path) -> None:
    gpt2.to(stored).save_pretrained(tmp_path)  # type: ignore[operator]
    wanted = {"auto": stored, "fp32": torch.float32, "bfloat16": torch.bfloat16}[asked]
    checkpoint = load(tmp_path, dtype=asked)
    assert checkpoint.dtype == wanted
    assert {p.dtype for p in checkpoint.model.parameters()} == {wanted}


def test_attention_kernel(gpt2: nn.Module, tmp_path: Path) -> None:
    gpt2.save_pretrained(tmp_path)  # type: ignore[operator]
    assert load(tmp_path, attn_implementation="eager").model.config._attn_implementation == "eager"
    assert "no-such" in refused(tmp_path, attn_implementation="no-such")


def byte_tokenizer(extra: int = 0) -> transformers.PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, *(f"<{i}>" for i in range(extra))])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("extra", [0, 100_001])
def test_tokenizer_beside_the_weights_without_network(
    extra: int, gpt2: nn.Module, tmp_path: Path, no_network: list[str]
) -> None:
    # transformers asks the hub about tokenizers of more than 100,000 tokens.
    gpt2.save_pretrained(tmp_path)  # type: ignore[operator]
    byte_tokenizer(extra).save_pretrained(tmp_path)
    checkpoint = load(str(tmp_path))
    assert checkpoint.tokenizer("ab").input_ids == byte_tokenizer()("ab").input_ids
    assert no_network == []


def test_tokenizer_from_elsewhere(gpt2: nn.Module, tmp_path: Path, no_network: list[str]) -> None:
    (tmp_path / "tokens").mkdir()
    byte_tokenizer().save_pretrained(tmp_path / "tokens")
    assert load(gpt2, tokenizer=tmp_path / "tokens").tokenizer("a").input_ids == byte_tokenizer()("a").input_ids
    mine = byte_tokenizer()
    assert load(gpt2, tokenizer=mine).tokenizer is mine
    assert "no tokenizer" in refused(gpt2, tokenizer=tmp_path)
    assert no_network == []


@pytest.mark.parametrize("cls", ["GPT2LMHeadModel", "LlamaForCausalLM", "BertModel"])
def test_no_tokenizer_is_none_and_not_an_empty_one(cls: str, tmp_path: Path) -> None:
    config = {"GPT2LMHeadModel": gpt2_config, "LlamaForCausalLM": llama_config, "BertModel": bert_config}[cls]()
    random(getattr(transformers, cls), config).save_pretrained(tmp_path)
    checkpoint = load(tmp_path)
    assert checkpoint.tokenizer is None
    assert checkpoint.notes == ()


def test_a_broken_tokenizer_is_a_note(gpt2: nn.Module, tmp_path: Path) -> None:
    gpt2.save_pretrained(tmp_path)  # type: ignore[operator]
    (tmp_path / "tokenizer.json").write_text("{")
    checkpoint = load(tmp_path)
    assert checkpoint.tokenizer is None
    assert "tokenizer could not be read" in checkpoint.notes[0]


def test_loading_is_silent_and_changes_no_setting(
    gpt2: nn.Module, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants as hub
    from transformers.utils import logging

    monkeypatch.delenv("DISABLE_SAFETENSORS_CONVERSION", raising=False)
    random(transformers.BertForMaskedLM, bert_config()).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["BertModel"]}))

    def settings() -> tuple[object, ...]:
        bars = logging.is_progress_bar_enabled()
        return logging.get_verbosity(), hub.HF_HUB_OFFLINE, bars, sys.stderr, dict(os.environ), list(warnings.filters)

    before = settings()
    capfd.readouterr()
    load(tmp_path)
    refused(tmp_path / "nothing")
    assert settings() == before
    assert capfd.readouterr() == ("", "")


# --- heads ---------------------------------------------------------------------------------------------------------


def test_masked_head(tmp_path: Path) -> None:
    model = random(transformers.BertForMaskedLM, bert_config())
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    checkpoint = load(tmp_path)
    assert checkpoint.objective == "masked"
    assert torch.equal(logits(checkpoint.model), logits(model))


def test_encoder_without_head_or_pooler(tmp_path: Path) -> None:
    model = random(transformers.BertModel, bert_config())
    weights = {name: tensor for name, tensor in model.state_dict().items() if "pooler" not in name}
    model.save_pretrained(tmp_path, state_dict=weights)  # type: ignore[operator]
    checkpoint = load(tmp_path)
    assert checkpoint.objective is None
    assert checkpoint.model.pooler is None
    assert torch.equal(logits(checkpoint.model), logits(model))


def test_head_that_is_not_in_the_checkpoint_is_left_out(tmp_path: Path) -> None:
    model = random(transformers.BertModel, bert_config())
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["BertForMaskedLM"]}))
    checkpoint = load(tmp_path)
    assert checkpoint.architecture == "BertModel"
    assert checkpoint.objective is None
    assert "head of BertForMaskedLM is not in the checkpoint" in checkpoint.notes[0]
    assert torch.equal(logits(checkpoint.model), logits(model))
    assert "miss" in refused(tmp_path, objective="masked")


def test_configuration_without_architecture_is_said(gpt2: nn.Module, tmp_path: Path) -> None:
    gpt2.save_pretrained(tmp_path)  # type: ignore[operator]
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": None}))
    assert "no architecture" in load(tmp_path).notes[0]
    assert torch.equal(logits(load(tmp_path, objective="causal").model), logits(gpt2))


def test_objective_none_opens_no_head_and_says_what_was_left(tmp_path: Path) -> None:
    random(transformers.LlamaForCausalLM, llama_config()).save_pretrained(tmp_path)
    checkpoint = load(tmp_path, objective=None)
    assert checkpoint.architecture == "LlamaModel"
    assert checkpoint.objective is None
    assert "lm_head.weight" in checkpoint.notes[0]


# --- lengths -------------------------------------------------------------------------------------------------------


def test_longest_sequence() -> None:
    def longest(model: nn.Module) -> int | None:
        checkpoint = load(model)
        if checkpoint.max_positions is not None:
            with torch.no_grad():  # it really takes that many
                model(input_ids=torch.full((1, checkpoint.max_positions), 5))
        return checkpoint.max_positions

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    roberta = transformers.RobertaConfig(vocab_size=100, max_position_embeddings=66, pad_token_id=1, **sizes)
    assert longest(transformers.RobertaForMaskedLM(roberta).eval()) == 64
    opt = transformers.OPTConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=64,
        max_position_embeddings=64,
    )
    assert longest(transformers.OPTForCausalLM(opt).eval()) == 64
    bloom = transformers.BloomConfig(vocab_size=100, hidden_size=32, n_layer=1, n_head=2)
    assert longest(transformers.BloomForCausalLM(bloom).eval()) is None
    mpt = transformers.MptConfig(vocab_size=100, d_model=32, n_layers=1, n_heads=2, max_seq_len=64)
    assert longest(transformers.MptForCausalLM(mpt).eval()) == 64
    falcon = transformers.FalconConfig(vocab_size=100, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    falcon.alibi = True
    assert longest(transformers.FalconForCausalLM(falcon).eval()) is None


# --- nanoGPT -------------------------------------------------------------------------------------------------------


class PlainNorm(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class PlainBlock(nn.Module):
    """A block with the parameter names of nanoGPT, written down from its definition."""

    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = PlainNorm(width, bias), PlainNorm(width, bias)
        self.attn, self.mlp = nn.Module(), nn.Module()
        self.attn.c_attn = nn.Linear(width, 3 * width, bias=bias)
        self.attn.c_proj = nn.Linear(width, width, bias=bias)
        self.attn.register_buffer("bias", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))
        self.mlp.c_fc = nn.Linear(width, 4 * width, bias=bias)
        self.mlp.c_proj = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        qkv = self.attn.c_attn(self.ln_1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5
        hidden = torch.triu(torch.ones(tokens, tokens, dtype=torch.bool), 1)
        mixed = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        x = x + self.attn.c_proj(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp.c_proj(F.gelu(self.mlp.c_fc(self.ln_2(x))))


class PlainGPT(nn.Module):
    def __init__(self, bias: bool, tied: bool = True) -> None:
        super().__init__()
        blocks = nn.ModuleList([PlainBlock(32, 2, bias) for _ in range(2)])
        parts = {"wte": nn.Embedding(100, 32), "wpe": nn.Embedding(64, 32), "h": blocks, "ln_f": PlainNorm(32, bias)}
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(32, 100, bias=False)
        if tied:
            self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.transformer["wte"](input_ids) + self.transformer["wpe"](torch.arange(input_ids.shape[1]))
        for block in self.transformer["h"]:  # type: ignore[union-attr]
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


def nanogpt(bias: bool = True, tied: bool = True, prefix: str = "") -> tuple[PlainGPT, dict[str, object]]:
    torch.manual_seed(1)
    model = PlainGPT(bias, tied)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 64, "bias": bias, "vocab_size": 100, "dropout": 0.0}
    weights = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    saved = {
        "model": weights,
        "model_args": sizes,
        "iter_num": 7,
        "best_val_loss": torch.tensor(3.0),
        "config": {"a": 1},
    }
    return model, saved


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "_orig_mod.module."])
def test_nanogpt_gives_the_original_logits(bias: bool, tied: bool, prefix: str, tmp_path: Path) -> None:
    model, saved = nanogpt(bias, tied, prefix)
    path = tmp_path / "out-tiny" / "ckpt.pt"
    path.parent.mkdir()
    torch.save(saved, path)
    checkpoint = load(path)
    with torch.no_grad():
        torch.testing.assert_close(logits(checkpoint.model), model(IDS), atol=1e-5, rtol=1e-4)
    assert (checkpoint.format, checkpoint.name, checkpoint.objective) == ("nanogpt", "out-tiny", "causal")
    assert (checkpoint.vocab_size, checkpoint.max_positions) == (100, 64)
    assert checkpoint.model.config.tie_word_embeddings is tied
    assert load(path, dtype="bf16").dtype == torch.bfloat16


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, ("should-not-exist",))


def test_a_fork_of_nanogpt_with_further_tensors_is_refused(tmp_path: Path) -> None:
    """What they do would be left out without a trace."""
    _, saved = nanogpt()
    saved["model"]["transformer.h.0.attn.q_norm.weight"] = torch.ones(8)
    torch.save(saved, tmp_path / "ckpt.pt")
    assert "a model that is not nanoGPT's" in refused(tmp_path / "ckpt.pt")


def test_bad_nanogpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x.pt"

    path.write_bytes(pickle.dumps(Evil()))
    assert "could run code" in refused(path)
    torch.save({"model": Evil(), "model_args": {}}, path)
    assert "could run code" in refused(path)
    assert not Path("should-not-exist").exists()
    path.write_bytes(b"not a pickle at all")
    refused(path)
    path.write_bytes(b"")
    assert "cannot be read" in refused(path)
    torch.save([1, 2], path)
    assert "holds a list" in refused(path)
    torch.save({"state_dict": {}, "epoch": 3}, path)
    assert "holds the keys epoch, state_dict" in refused(path)
    _, saved = nanogpt()
    torch.save({**saved, "model_args": {"n_layer": 2}}, path)
    assert "model_args" in refused(path)
    torch.save({**saved, "model": [1]}, path)
    assert "state dict" in refused(path)
    torch.save({**saved, "model_args": {**saved["model_args"], "n_head": 5}}, path)  # type: ignore[dict-item]
    refused(path)
    torch.save({**saved, "model_args": {**saved["model_args"], "n_embd": 16}}, path)  # type: ignore[dict-item]
    assert "do not fit" in refused(path)
    weights = dict(saved["model"])  # type: ignore[call-overload]
    del weights["transformer.h.1.mlp.c_fc.bias"]
    torch.save({**saved, "model": weights}, path)
    assert "transformer.h.1.mlp.c_fc.bias" in refused(path)
    torch.save(saved, path)
    path.write_bytes(path.read_bytes()[:-5000])
    assert "cannot be read" in refused(path)


# --- gguf ----------------------------------------------------------------------------------------------------------


def write_gguf(model: nn.Module, path: Path, changes: dict[str, object] | None = None, **more: np.ndarray) -> None:
    """A float gguf of a Llama, with its rows of queries and keys in the order that llama.cpp wants."""
    gguf = pytest.importorskip("gguf")
    config = model.config
    assert isinstance(config, LlamaConfig)
    writer = gguf.GGUFWriter(path, "llama")
    stated = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        **(changes or {}),
    }
    writers = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in stated.items():
        if value is None:
            continue
        writers[type(value)](key if "." in key and key.startswith("split") else f"llama.{key}", value)
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for part, count in heads.items():
            if part in name:  # halves of a head → pairs
                tensor = tensor.view(count, 2, -1, tensor.shape[-1]).transpose(1, 2).reshape(tensor.shape)
        name = name.replace("model.layers.", "blk.")
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        writer.add_tensor(name, tensor.float().numpy())
    for name, array in more.items():
        writer.add_tensor(name.replace("__", "."), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tied", [True, False])
def test_gguf_gives_the_original_logits(tied: bool, tmp_path: Path, no_network: list[str]) -> None:
    model = random(transformers.LlamaForCausalLM, llama_config(tie_word_embeddings=tied, rms_norm_eps=1e-3))
    write_gguf(model, tmp_path / "tiny.gguf")
    checkpoint = load(tmp_path / "tiny.gguf")
    torch.testing.assert_close(logits(checkpoint.model), logits(model), atol=1e-5, rtol=1e-4)
    assert (checkpoint.format, checkpoint.name, checkpoint.objective) == ("gguf", "tiny", "causal")
    assert (checkpoint.dtype, checkpoint.vocab_size, checkpoint.max_positions) == (torch.float32, 100, 64)
    assert checkpoint.parameters == sum(p.numel() for p in model.parameters())
    assert load(tmp_path / "tiny.gguf", dtype="bf16").dtype == torch.bfloat16
    assert no_network == []


def test_gguf_rotary_factors_are_not_lost(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    model = random(transformers.LlamaForCausalLM, llama_config(rope_parameters=rope))
    width = model.config.head_dim
    plain = 10000.0 ** -(np.arange(0, width, 2) / width)
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert factors.max() > 2
    write_gguf(model, tmp_path / "tiny.gguf", rope_freqs__weight=factors)
    checkpoint = load(tmp_path / "tiny.gguf")
    torch.testing.assert_close(logits(checkpoint.model), logits(model), atol=1e-4, rtol=1e-4)
    assert any("rotary" in note for note in checkpoint.notes)


def test_gguf_settings_that_transformers_drops_are_corrected(tmp_path: Path) -> None:
    # For a Llama, transformers takes the width of a head from rope.dimension_count alone.
    model = random(transformers.LlamaForCausalLM, llama_config(head_dim=16))
    write_gguf(model, tmp_path / "tiny.gguf", {"rope.dimension_count": None, "attention.key_length": 16})
    checkpoint = load(tmp_path / "tiny.gguf")
    torch.testing.assert_close(logits(checkpoint.model), logits(model), atol=1e-5, rtol=1e-4)
    assert "transformers read head_dim = 8 where the file says 16: corrected" in checkpoint.notes


@pytest.mark.parametrize(
    ("config", "settings", "name", "value"),
    [
        (transformers.Phi3Config(sliding_window=None), {"attention.sliding_window": 2047}, "sliding_window", 2047),
        (transformers.MistralConfig(), {}, "sliding_window", None),
        (transformers.MistralConfig(), {"attention.sliding_window": 4096}, "sliding_window", 4096),
        (transformers.Gemma2Config(hidden_size=4608, num_attention_heads=32, num_hidden_layers=46), {},
         "query_pre_attn_scalar", 144),
        (transformers.Gemma2Config(num_hidden_layers=42), {}, "query_pre_attn_scalar", 256),
    ],
)  # fmt: skip
def test_gguf_settings_that_only_follow_from_the_file(config, settings, name, value) -> None:
    default = getattr(config, name)
    notes = conversions._imply(config, settings)
    assert getattr(config, name) == value
    assert bool(notes) == (value != default)


def test_attention_that_changes_with_the_length_of_a_text(tmp_path: Path) -> None:
    config = transformers.BigBirdConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    transformers.BigBirdForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"block_sparse attention.*expected attention_type original_full"):
        load(tmp_path)


def test_gguf_without_its_head(tmp_path: Path) -> None:
    model = random(transformers.LlamaForCausalLM, llama_config())
    write_gguf(model, tmp_path / "tiny.gguf")
    checkpoint = load(tmp_path / "tiny.gguf", objective=None)
    assert (checkpoint.architecture, checkpoint.objective) == ("LlamaModel", None)
    torch.testing.assert_close(logits(checkpoint.model), logits(model.model), atol=1e-5, rtol=1e-4)


def test_gguf_leaves_the_gguf_package_as_it_was(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    before = gguf.GGUFReader, gguf.get_tensor_name_map
    write_gguf(random(transformers.LlamaForCausalLM, llama_config()), tmp_path / "tiny.gguf", {"block_count": 3})
    refused(tmp_path / "tiny.gguf")
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before


def test_bad_gguf(tmp_path: Path) -> None:
    model = random(transformers.LlamaForCausalLM, llama_config())
    path = tmp_path / "tiny.gguf"
    write_gguf(model, path)
    whole = path.read_bytes()
    for length in (2, 10, 100, len(whole) // 2, len(whole) - 100):
        path.write_bytes(whole[:length])
        refused(path)
    path.write_bytes(b"")
    assert "not a gguf" in refused(path)
    path.write_bytes(b"GIF89a" + bytes(1000))
    assert "not a gguf" in refused(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60) + bytes(100))
    refused(path)
    write_gguf(model, path, blk__0__attn_q__bias=np.ones(32, np.float32))
    assert "dropped some" in refused(path)
    write_gguf(model, path, {"block_count": 3})
    assert "miss 9 tensors" in refused(path)
    write_gguf(model, path, {"rope.scaling.type": "yarn"})
    assert "yarn" in refused(path)
    write_gguf(model, path, {"split.count": 2})
    assert "one of 2 parts" in refused(path)


def test_gguf_without_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert 'pip install "depthprobe[gguf]"' in refused(tmp_path / "x.gguf")


# --- modules -------------------------------------------------------------------------------------------------------


def test_transformers_module_is_used_as_it_is(gpt2: nn.Module) -> None:
    gpt2.train()
    checkpoint = load(gpt2)
    assert checkpoint.model is gpt2
    assert not gpt2.training
    assert (checkpoint.format, checkpoint.objective, checkpoint.inputs) == ("module", "causal", "ids")
    assert checkpoint.name == "GPT2LMHeadModel"
    assert load(checkpoint).model is gpt2
    assert load(checkpoint, objective=None).objective is None
    assert load(gpt2, dtype="bf16").dtype == torch.bfloat16


@pytest.mark.parametrize("norm_first", [True, False])
def test_torch_encoder_takes_states(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, norm_first=norm_first)
    checkpoint = load(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    assert (checkpoint.inputs, checkpoint.objective, checkpoint.vocab_size) == ("states", None, None)
    assert not checkpoint.is_hf


def test_plain_module() -> None:
    model, _ = nanogpt()
    checkpoint = load(model)
    assert (checkpoint.inputs, checkpoint.objective, checkpoint.vocab_size) == ("ids", None, 100)
    assert checkpoint.max_positions is None
    assert load(model, objective="causal").objective == "causal"
    assert load(model, inputs="states").vocab_size is None
    assert load(nn.Sequential(nn.Linear(4, 4))).inputs == "states"
    assert load(nn.DataParallel(model)).model is model
    assert "no parameters" in refused(nn.ReLU())


def test_mixed_dtypes_and_tied_parameters_are_counted_once() -> None:
    model, _ = nanogpt()
    for block in model.transformer["h"]:  # type: ignore[union-attr]
        block.half()
    checkpoint = load(model)
    assert checkpoint.dtype == torch.float16
    assert checkpoint.parameters == sum(p.numel() for p in set(model.parameters()))
    assert checkpoint.device == torch.device("cpu")


def test_encoder_decoder_is_refused(tmp_path: Path) -> None:
    config = transformers.T5Config(vocab_size=100, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2)
    model = transformers.T5ForConditionalGeneration(config)
    model.save_pretrained(tmp_path)
    assert "encoder–decoder" in refused(tmp_path)
    assert "encoder–decoder" in refused(model)


def test_pixels_are_refused() -> None:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=16
    )
    assert "pixel_values" in refused(transformers.ViTModel(config))


# --- the hub -------------------------------------------------------------------------------------------------------


def test_unreachable_hub_is_one_quick_line(
    no_network: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    import huggingface_hub.constants as hub

    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    start = time.monotonic()
    message = refused("no-such-org/no-such-model")
    assert time.monotonic() - start < 10
    assert "neither a local path nor in the cache" in message
    assert "network" in message
    assert "cannot be reached" in refused("no-such-model@main")
    assert no_network


def test_hub_checkpoint_from_the_cache(
    gpt2: nn.Module, no_network: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants as hub

    commit = "0123456789abcdef0123456789abcdef01234567"
    home = tmp_path / "models--org--tiny"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(commit)
    (home / "refs" / "v1").write_text(commit)
    gpt2.save_pretrained(home / "snapshots" / commit)  # type: ignore[operator]
    byte_tokenizer().save_pretrained(home / "snapshots" / commit)
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    for spec in ("org/tiny", "org/tiny@v1", f"org/tiny@{commit}"):
        checkpoint = load(spec)
        assert torch.equal(logits(checkpoint.model), logits(gpt2))
        assert (checkpoint.format, checkpoint.name, checkpoint.revision) == ("hub", "tiny", commit)
        assert checkpoint.source == spec
        assert checkpoint.tokenizer is not None
    assert load("org/tiny", revision="v1").revision == commit


def test_what_the_hub_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import HfApi, errors

    def failing(error: type[Exception]) -> object:
        bare = type(error.__name__, (error,), {"__init__": lambda self: None, "__str__": lambda self: "x"})

        def fail(*_: object, **__: object) -> None:
            raise bare()

        return fail

    monkeypatch.setattr(HfApi, "model_info", failing(errors.RepositoryNotFoundError))
    assert "hf auth login" in refused("org/missing")
    monkeypatch.setattr(HfApi, "model_info", failing(errors.RevisionNotFoundError))
    assert "no revision 'v9'" in refused("org/tiny@v9")
    monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: type("Info", (), {"sha": "f" * 40}))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", failing(errors.GatedRepoError))
    assert "is gated" in refused("org/gated")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", failing(errors.EntryNotFoundError))
    assert "no config.json" in refused("org/other")


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec", ["./missing", "~/missing-model", "a/b/c", "missing.gguf", "missing.pt", Path("missing")]
)
def test_missing_path(spec: str | Path, no_network: list[str]) -> None:
    assert "no such file" in refused(spec)
    assert no_network == []


def test_bad_arguments(gpt2: nn.Module, tmp_path: Path) -> None:
    gpt2.save_pretrained(tmp_path)  # type: ignore[operator]
    assert "empty string" in refused("", UsageError)
    assert "empty revision" in refused("org/model@", UsageError)
    assert "neither a path" in refused("no such model!", UsageError)
    assert "another" in refused("org/model@a", UsageError, revision="b")
    assert "revision" in refused(tmp_path, UsageError, revision="main")
    assert "bfloat16" in refused(tmp_path, UsageError, dtype="float8000")
    assert "int8" in refused(tmp_path, UsageError, dtype=torch.int8)
    assert "nonsense" in refused(tmp_path, UsageError, device="nonsense")
    assert "states" in refused(tmp_path, UsageError, inputs="pixels")
    assert "masked" in refused(tmp_path, UsageError, objective="regression")
    assert "memory" in refused(gpt2, UsageError, attn_implementation="eager")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_absent_gpu(gpt2: nn.Module) -> None:
    assert "cuda" in refused(gpt2, UsageError, device="cuda")


def test_bad_directories(gpt2: nn.Module, tmp_path: Path) -> None:
    assert "no config.json" in refused(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert "a.gguf" in refused(tmp_path)
    gpt2.config.save_pretrained(tmp_path)  # type: ignore[union-attr, operator]
    assert "no weights" in refused(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "no weights" in refused(tmp_path)
    gpt2.save_pretrained(tmp_path)  # type: ignore[operator]
    config, weights = (tmp_path / "config.json").read_text(), (tmp_path / "model.safetensors").read_bytes()
    for length in (4, 100, len(weights) - 1000):
        (tmp_path / "model.safetensors").write_bytes(weights[:length])
        assert "cannot be read" in refused(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert "directory" in refused(tmp_path / "model.safetensors")
    for broken in ("{", "\xff\xfe", "[]", "{}", '{"model_type": 3}'):
        (tmp_path / "config.json").write_text(broken, encoding="latin-1")
        assert "config.json" in refused(tmp_path)
    (tmp_path / "config.json").write_text(config.replace('"gpt2"', '"gpt-9"'))
    assert "gpt-9" in refused(tmp_path)
    (tmp_path / "config.json").write_text(config.replace('"n_embd": 32', '"n_embd": 64'))
    assert "do not fit" in refused(tmp_path)
    (tmp_path / "config.json").write_text(config.replace('"n_embd": 32', '"n_embd": "many"'))
    refused(tmp_path)
    (tmp_path / "config.json").write_text(config.replace('"n_layer": 2', '"n_layer": 3'))
    message = refused(tmp_path)
    assert "miss 12 tensors" in message
    assert "transformer.h.2." in message


def test_missing_shard(gpt2: nn.Module, tmp_path: Path) -> None:
    gpt2.save_pretrained(tmp_path, max_shard_size="20KB")  # type: ignore[operator]
    next(iter(tmp_path.glob("*-of-*"))).unlink()
    refused(tmp_path)


def test_legacy_weights_never_run_code(gpt2: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    gpt2.config.save_pretrained(tmp_path)  # type: ignore[union-attr, operator]
    torch.save({"wte.weight": Evil()}, tmp_path / "pytorch_model.bin")
    refused(tmp_path)
    assert not Path("should-not-exist").exists()


REMOTE = """
import torch
from transformers import PreTrainedConfig, PreTrainedModel
class OddConfig(PreTrainedConfig):
    model_type = "odd-one"
class OddForCausalLM(PreTrainedModel):
    config_class = OddConfig
    def __init__(self, config):
        super().__init__(config)
        self.table = torch.nn.Embedding(100, 8)
        self.post_init()
    def get_input_embeddings(self):
        return self.table
    def forward(self, input_ids):
        return self.table(input_ids)
"""


def test_remote_code_runs_only_if_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import save_file

    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "odd.py").write_text(REMOTE)
    classes = {"AutoConfig": "odd.OddConfig", "AutoModelForCausalLM": "odd.OddForCausalLM"}
    config = {"model_type": "odd-one", "architectures": ["OddForCausalLM"], "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"table.weight": torch.randn(100, 8)}, folder / "model.safetensors", {"format": "pt"})
    assert "--trust-remote-code" in refused(folder)
    assert not (tmp_path / "modules").exists()
    checkpoint = load(folder, trust_remote_code=True)
    assert (checkpoint.architecture, checkpoint.objective, checkpoint.vocab_size) == ("OddForCausalLM", "causal", 100)


# --- real weights --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> Checkpoint:
    if not SMOLLM2.exists():
        pytest.skip("`make weights` fetches it")
    return load(SMOLLM2, device="cpu")


@pytest.mark.real
def test_smollm2(smollm2: Checkpoint) -> None:
    assert smollm2.architecture == "LlamaForCausalLM"
    assert smollm2.model.config.num_hidden_layers == 30
    assert smollm2.model.lm_head.weight is smollm2.model.model.embed_tokens.weight
    assert (smollm2.vocab_size, smollm2.max_positions, smollm2.dtype) == (49152, 8192, torch.float32)
    assert smollm2.model.config.rope_parameters["rope_theta"] == 100000
    assert smollm2.parameters == 134_515_008
    ids = smollm2.tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        best = smollm2.model(ids).logits[0, -1].argmax()
    assert smollm2.tokenizer.decode(best).strip() == "Paris"
    assert smollm2.tokenizer.decode(smollm2.tokenizer("In 1984, naïve.").input_ids) == "In 1984, naïve."


@pytest.mark.real
def test_truncated_smollm2(tmp_path: Path) -> None:
    if not SMOLLM2.exists():
        pytest.skip("`make weights` fetches it")
    (tmp_path / "cut.gguf").write_bytes(SMOLLM2.read_bytes()[:50_000_000])
    assert "cut short" in refused(tmp_path / "cut.gguf")


@pytest.mark.real
def test_minilm(no_network: list[str]) -> None:
    if not MINILM.exists():
        pytest.skip("`make weights` fetches it")
    checkpoint = load(MINILM, device="cpu")
    assert (checkpoint.architecture, checkpoint.objective, checkpoint.inputs) == ("BertModel", None, "ids")
    assert (checkpoint.vocab_size, checkpoint.max_positions) == (30522, 512)
    reference = AutoTokenizer.from_pretrained(MINILM, local_files_only=True)
    assert checkpoint.tokenizer("How deep is it?").input_ids == reference("How deep is it?").input_ids
    assert no_network == []


def test_a_module_cast_from_python_keeps_what_was_computed() -> None:
    """Rotary frequencies in bfloat16 would be 0.4 rad off at position 255; loading in bfloat16 keeps them."""
    model = build("llama")
    before = {name: values.clone() for name, values in model.named_buffers() if "inv_freq" in name}
    assert before
    load(model, dtype="bfloat16", device="cpu")
    assert {values.dtype for values in model.parameters()} == {torch.bfloat16}
    after = dict(model.named_buffers())
    assert all(torch.equal(values, after[name]) for name, values in before.items())


@pytest.mark.parametrize(("text", "path"), [("org/name@refs/pr/3", False), ("a/b/c", True), ("org/name", False)])
def test_a_revision_may_have_slashes(text: str, path: bool) -> None:
    assert _looks_like_path(text) is path
