"""Tiny random models of every family, made from configs: no network, no weights, nothing degenerate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as T
from torch import nn

import depthprobe
from depthprobe import Report

__all__ = ["EMBEDDED", "FAMILIES", "IDS", "MINILM", "SMOLLM2", "VOCAB", "Family", "analyze", "build", "ids", "shake"]

REPO = Path(__file__).resolve().parents[1]
SMOLLM2 = REPO / ".weights" / "SmolLM2-135M-Instruct.Q4_1.gguf"
MINILM = REPO / ".weights" / "all-MiniLM-L6-v2"
EMBEDDED = REPO / "data" / "gpt2-manual"

VOCAB, WIDTH, DEPTH, HEADS, POSITIONS = 96, 32, 3, 4, 128
SIZES = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS}
INNER = {"intermediate_size": 64}
LENGTH = {"max_position_embeddings": POSITIONS}
GROUPED = {"num_key_value_heads": 2}
HEAD = {"head_dim": 8}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
OLD = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": DEPTH, "n_head": HEADS, "n_positions": POSITIONS}
LLAMA = {**SIZES, **INNER, **LENGTH, **SPECIAL, **GROUPED}
BERT = {**SIZES, **INNER, **LENGTH, "pad_token_id": 0}
OPT = {**SIZES, **LENGTH, **SPECIAL, "ffn_dim": 64, "word_embed_proj_dim": WIDTH}
FALCON = {**SIZES, **SPECIAL, **LENGTH}
NEOX = {**SIZES, **INNER, **LENGTH, "bos_token_id": 1, "eos_token_id": 2}
GRANITE = {"residual_multiplier": 0.22, "embedding_multiplier": 12.0, "logits_scaling": 8.0}

Config = Callable[[], Any]


@dataclass(frozen=True)
class Family:
    """What the architecture's paper and code say; `attention` and `mlp` are norm placements, one for all blocks."""

    config: Config
    attention: str = "pre"
    mlp: str = "pre"
    parallel: bool = False
    causal: bool = True
    scale: float = 1.0


def _encoder(config: Config, placement: str = "post") -> Family:
    return Family(config, placement, placement, causal=False)


FAMILIES: dict[str, Family] = {
    "gpt2": Family(lambda: T.GPT2Config(**OLD, bos_token_id=1, eos_token_id=2)),
    "llama": Family(lambda: T.LlamaConfig(**LLAMA)),
    "gemma3": Family(
        lambda: T.Gemma3TextConfig(
            **LLAMA,
            **HEAD,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        "sandwich",
        "sandwich",
    ),
    "olmo2": Family(lambda: T.Olmo2Config(**LLAMA), "branch", "branch"),
    "neox": Family(lambda: T.GPTNeoXConfig(**NEOX, use_parallel_residual=True), parallel=True),
    "opt-post": Family(lambda: T.OPTConfig(**OPT, do_layer_norm_before=False), "post", "post"),
    "bert": _encoder(lambda: T.BertConfig(**BERT)),
    "granite": Family(lambda: T.GraniteConfig(**LLAMA, **GRANITE, attention_multiplier=0.35), scale=0.22),
    "mistral": Family(lambda: T.MistralConfig(**LLAMA, sliding_window=8)),
    "qwen2": Family(lambda: T.Qwen2Config(**LLAMA)),
    "qwen3": Family(lambda: T.Qwen3Config(**LLAMA, **HEAD)),
    "gemma2": Family(lambda: T.Gemma2Config(**LLAMA, **HEAD, sliding_window=8), "sandwich", "sandwich"),
    "neox-sequential": Family(lambda: T.GPTNeoXConfig(**NEOX, use_parallel_residual=False)),
    "gptj": Family(lambda: T.GPTJConfig(**OLD, rotary_dim=4, bos_token_id=1, eos_token_id=2), parallel=True),
    "phi": Family(lambda: T.PhiConfig(**SIZES, **INNER, **LENGTH, **SPECIAL), parallel=True),
    "falcon": Family(lambda: T.FalconConfig(**FALCON, alibi=False), parallel=True),
    "falcon-new": Family(
        lambda: T.FalconConfig(**FALCON, alibi=False, num_kv_heads=2, new_decoder_architecture=True), parallel=True
    ),
    "falcon-sequential": Family(lambda: T.FalconConfig(**FALCON, parallel_attn=False, alibi=True)),
    "bloom": Family(lambda: T.BloomConfig(vocab_size=VOCAB, hidden_size=WIDTH, n_layer=DEPTH, n_head=HEADS, **SPECIAL)),
    "mpt": Family(lambda: T.MptConfig(vocab_size=VOCAB, d_model=WIDTH, n_layers=DEPTH, n_heads=HEADS, max_seq_len=128)),
    "opt": Family(lambda: T.OPTConfig(**OPT)),
    "openai-gpt": Family(lambda: T.OpenAIGPTConfig(**OLD), "post", "post"),
    "roberta": _encoder(lambda: T.RobertaConfig(**SIZES, **INNER, max_position_embeddings=POSITIONS + 2)),
    "distilbert": _encoder(
        lambda: T.DistilBertConfig(
            vocab_size=VOCAB, dim=WIDTH, hidden_dim=64, n_layers=DEPTH, n_heads=HEADS, **LENGTH, pad_token_id=0
        )
    ),
    # Block 0 of ModernBERT reads an embedding that is already normalised: its attention has no norm of its own.
    "modernbert": _encoder(
        lambda: T.ModernBertConfig(
            **{**SIZES, **INNER, **LENGTH, **SPECIAL},
            cls_token_id=1,
            sep_token_id=2,
            global_attn_every_n_layers=2,
            local_attention=8,
        ),
        "pre",
    ),
    "esm": _encoder(
        lambda: T.EsmConfig(
            **SIZES,
            **INNER,
            max_position_embeddings=POSITIONS + 2,
            pad_token_id=1,
            mask_token_id=3,
            position_embedding_type="rotary",
        ),
        "pre",
    ),
    "mixtral": Family(lambda: T.MixtralConfig(**LLAMA, num_local_experts=4)),
    "cohere": Family(lambda: T.CohereConfig(**LLAMA), parallel=True),
}


def build(name: str, attention: str = "eager", headless: bool = False, seed: int = 0) -> nn.Module:
    """The family's model with random weights, in eval mode; without its head if asked."""
    family = FAMILIES[name]
    auto = T.AutoModel if headless else T.AutoModelForCausalLM if family.causal else T.AutoModelForMaskedLM
    torch.manual_seed(seed)
    return shake(auto.from_config(family.config(), attn_implementation=attention))


def shake(model: nn.Module) -> nn.Module:
    """Move every parameter away from where initialisation puts it: biases at 0, gains at 1, matrices near 0."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(5)
    return model.eval()


def analyze(model: Any, data: Any, **options: Any) -> Report:
    """The unmodified run alone, on the CPU."""
    return depthprobe.analyze(
        model, data, **{"device": "cpu", "ablations": False, "gradient_tokens": 0, "depth_tokens": 0, **options}
    )


def ids(sequences: int, tokens: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    """Random token ids `[sequences, tokens]`, none of them special."""
    return torch.randint(4, vocab, (sequences, tokens), generator=torch.Generator().manual_seed(seed))


IDS = ids(3, 20)
