"""One transformer with its norms where its configuration says, causal or bidirectional."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput, MaskedLMOutput

from depthprobe.errors import UsageError
from depthprobe.lab.config import LabConfig
from depthprobe.lab.initialise import Matrix, deepnorm_alpha, embedding_std, fill
from depthprobe.lab.norms import Norm, make_norm

__all__ = ["Attention", "Block", "LabForCausalLM", "LabForMaskedLM", "LabModel", "Mlp", "Pair", "Skip"]


class Attention(nn.Module):
    """Multi-head self-attention; with residual attention, on top of the scores of the block before."""

    def __init__(self, config: LabConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.config, self.heads = config, config.num_attention_heads
        self.qkv = Matrix(width, 3 * width, "query", "key", "value")
        self.output = Matrix(width, width, "output")
        size = width // self.heads
        self.query_norm = nn.RMSNorm(size, eps=config.norm_eps) if config.qk_norm else None
        self.key_norm = nn.RMSNorm(size, eps=config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, scores: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What is added to the stream, and the scores for the next block where it wants them.

        Args:
            x: `[batch, tokens, width]`.
            scores: what the block before returned, `[batch, heads, tokens, tokens]`, before mask and softmax.
            mask: true where a position may look, `[batch, 1, tokens, tokens]`; None stands for every position, in a
                causal model every earlier one and itself.
        """
        batch, tokens, width = x.shape
        # One view for all three, since each costs as much as a small matrix product.
        query, key, value = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind()
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.config.residual_attention or self.config._attn_implementation == "eager":
            mixed, scores = self._by_scores(query, key, value, scores, mask)
        else:
            causal = self.config.causal and mask is None
            mixed, scores = F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal), None
        return self.output(mixed.transpose(1, 2).reshape(batch, tokens, width)), scores

    def _by_scores(
        self, query: Tensor, key: Tensor, value: Tensor, scores: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The same with the scores written out, and the sum of scores that goes on to the next block."""
        own = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        if scores is not None:
            own = own + scores
        if mask is None and self.config.causal:
            mask = torch.ones(own.shape[-2:], dtype=torch.bool, device=own.device).tril()
        seen = own if mask is None else own.masked_fill(~mask, -torch.inf)
        return seen.softmax(dim=-1) @ value, own if self.config.residual_attention else None


class Mlp(nn.Module):
    """Two matrices with a GELU between them."""

    def __init__(self, config: LabConfig) -> None:
        super().__init__()
        self.inner = Matrix(config.hidden_size, config.inner_size, "inner")
        self.outer = Matrix(config.inner_size, config.hidden_size, "outer")

    def forward(self, x: Tensor) -> Tensor:
        """What is added to the stream, `[batch, tokens, width]` to the same."""
        return self.outer(F.gelu(self.inner(x)))


class Gain(nn.Module):
    """A learned factor for every dimension: Admin's ω."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, tokens, width]` to the same."""
        return self.weight * x


class Skip(nn.Module):
    """How one branch F is joined to the stream: what it reads, what becomes of what it writes, and the sum.

    Args:
        config: names the placement.
        index: of the block, from 0, for the LayerNorm scaling.
        closes: it makes the sum; of two branches that are added at once, only the second does.
    """

    def __init__(self, config: LabConfig, index: int, closes: bool = True) -> None:
        super().__init__()
        self.norm_before = make_norm(config) if config.norm_before else None
        self.norm_update = make_norm(config) if config.norm_on_update else None
        self.norm_after = make_norm(config) if config.norm_after and closes else None
        self.gain = Gain(config.hidden_size) if config.initialisation == "admin" and closes else None
        self.alpha = deepnorm_alpha(config.num_hidden_layers) if config.placement == "deepnorm" else 1.0
        self.scaling = 1 / math.sqrt(index + 1) if config.layernorm_scaling else 1.0

    def read(self, x: Tensor) -> Tensor:
        """What the branch is given: N(x) or x."""
        if self.norm_before is None:
            return x
        normed = self.norm_before(x)
        return normed if self.scaling == 1.0 else self.scaling * normed

    def update(self, written: Tensor) -> Tensor:
        """What is added for what the branch wrote: N(F) or F."""
        return written if self.norm_update is None else self.norm_update(written)

    def add(self, x: Tensor, update: Tensor) -> Tensor:
        """The stream after the branch: x + u, N(x + u), N(αx + u) or N(ω ⊙ x + u)."""
        if self.gain is not None:
            x = self.gain(x)
        total = x + update if self.alpha == 1.0 else torch.add(update, x, alpha=self.alpha)
        return total if self.norm_after is None else self.norm_after(total)


class Block(nn.Module):
    """Attention, then an MLP, each with its skip."""

    def __init__(self, config: LabConfig, index: int, closes: bool = True) -> None:
        super().__init__()
        self.carries_scores = config.residual_attention
        self.attention = Attention(config)
        self.attention_skip = Skip(config, index, closes)
        self.mlp = Mlp(config)
        self.mlp_skip = Skip(config, index, closes)

    def forward(self, x: Tensor, scores: Tensor | None = None, mask: Tensor | None = None) -> Any:
        """The stream `[batch, tokens, width]`, and with residual attention the scores beside it, in a tuple."""
        update, scores = self.attend(x, scores, mask)
        x = self.attention_skip.add(x, update)
        x = self.mlp_skip.add(x, self.think(x))
        return (x, scores) if self.carries_scores else x

    def attend(self, x: Tensor, scores: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What the attention adds to x, and its scores."""
        written, scores = self.attention(self.attention_skip.read(x), scores, mask)
        return self.attention_skip.update(written), scores

    def think(self, x: Tensor) -> Tensor:
        """What the MLP adds to x."""
        return self.mlp_skip.update(self.mlp(self.mlp_skip.read(x)))


class Pair(nn.Module):
    """Two blocks side by side: x + F_a(x) + F_b(x), or both attentions side by side and then both MLPs.

    Both are given the scores of the pair before; those of the second go on.
    """

    def __init__(self, config: LabConfig, index: int) -> None:
        super().__init__()
        self.whole = config.parallel_pairs == "blocks"
        self.carries_scores = config.residual_attention
        self.first = Block(config, index, closes=self.whole)
        self.second = Block(config, index + 1)

    def forward(self, x: Tensor, scores: Tensor | None = None, mask: Tensor | None = None) -> Any:
        """As a block's."""
        if self.whole:
            a, b = self.first(x, scores, mask), self.second(x, scores, mask)
            if self.carries_scores:
                (a, _), (b, scores) = a, b
            x = a + b - x
        else:
            (a, _), (b, scores) = self.first.attend(x, scores, mask), self.second.attend(x, scores, mask)
            x = self.second.attention_skip.add(x, a + b)
            x = self.second.mlp_skip.add(x, self.first.think(x) + self.second.think(x))
        return (x, scores) if self.carries_scores else x


class _LabPreTrainedModel(PreTrainedModel):
    """What the three models share with transformers."""

    config_class = LabConfig
    base_model_prefix = "model"
    _no_split_modules = ("Block", "Pair")
    _supports_sdpa = True

    def __init__(self, config: LabConfig) -> None:
        config.check()  # its values may have been changed since it was made
        super().__init__(config)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Called by transformers for each module whose weights were not read from a file."""
        if isinstance(module, Matrix):
            fill(module, self.config)
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(std=embedding_std(self.config))
        elif isinstance(module, Gain):
            module.weight.fill_(1.0)
        elif isinstance(module, Norm):
            module.reset_parameters()


class LabModel(_LabPreTrainedModel):
    """Embeddings, blocks, and the final norm where the placement has one."""

    def __init__(self, config: LabConfig) -> None:
        super().__init__(config)
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embedding = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        indices = range(config.num_hidden_layers)
        if config.parallel_pairs:
            self.blocks = nn.ModuleList(Pair(config, index) for index in indices[::2])
        else:
            self.blocks = nn.ModuleList(Block(config, index) for index in indices)
        self.final_norm = make_norm(config) if config.final_norm else None
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
    ) -> BaseModelOutput:
        """The last state.

        Args:
            input_ids: `[batch, tokens]`.
            attention_mask: 1 for a token and 0 for padding, `[batch, tokens]`.
            inputs_embeds: rows to use instead of the tokens', `[batch, tokens, width]`; positions are added to them.
            use_cache: taken because transformers' callers give it; nothing is cached.

        Raises:
            UsageError: more tokens than positions, or neither or both of ids and embeddings.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise UsageError("neither or both of input_ids and inputs_embeds were given", "one of them")
        x = self.token_embedding(input_ids) if inputs_embeds is None else inputs_embeds
        tokens, limit = x.shape[1], self.config.max_position_embeddings
        if tokens > limit:
            raise UsageError(f"a sequence of {tokens} tokens", f"at most {limit}", "the positions are learned")
        x = x + self.position_embedding.weight[:tokens]
        mask = None if attention_mask is None else _mask(attention_mask, self.config.causal)
        if self.config.residual_attention:
            scores = None
            for block in self.blocks:
                x, scores = block(x, scores, mask)
        else:
            for block in self.blocks:
                x = block(x, None, mask)
        return BaseModelOutput(last_hidden_state=x if self.final_norm is None else self.final_norm(x))

    def get_input_embeddings(self) -> nn.Module:
        """The token table."""
        return self.token_embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Another token table."""
        self.token_embedding = value


class _WithHead(_LabPreTrainedModel):
    """A lab model and a linear head without a bias."""

    _tied_weights_keys = {"lm_head.weight": "model.token_embedding.weight"}  # noqa: RUF012
    causal: bool

    def __init__(self, config: LabConfig) -> None:
        super().__init__(config)
        if config.causal is not self.causal:
            fitting = "LabForCausalLM" if config.causal else "LabForMaskedLM"
            raise UsageError(f"a {type(self).__name__} with causal={config.causal}", f"causal={self.causal}, {fitting}")
        self.model = LabModel(config)
        self.lm_head = Matrix(config.hidden_size, config.vocab_size, "head", bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The token table."""
        return self.model.token_embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Another token table."""
        self.model.token_embedding = value

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        return self.lm_head

    def set_output_embeddings(self, value: Matrix) -> None:
        """Another head."""
        self.lm_head = value


class LabForCausalLM(_WithHead):
    """A language model that predicts each next token."""

    causal = True

    def forward(self, input_ids: Tensor | None = None, labels: Tensor | None = None, **inputs: Any) -> CausalLMOutput:
        """Logits `[batch, tokens, vocabulary]`, and the mean cross-entropy in nats where there are labels.

        Args:
            input_ids: `[batch, tokens]`.
            labels: ids `[batch, tokens]`, usually the same; the shift by one is made here. −100 is left out.
            inputs: see `LabModel.forward`.
        """
        logits = self.lm_head(self.model(input_ids, **inputs).last_hidden_state)
        if labels is not None:
            labels = F.pad(labels[:, 1:], (0, 1), value=-100)  # cheaper than a copy of all logits but the last
        return CausalLMOutput(loss=_loss(logits, labels), logits=logits)


class LabForMaskedLM(_WithHead):
    """A language model that sees every position and predicts the tokens that the labels name."""

    causal = False

    def forward(self, input_ids: Tensor | None = None, labels: Tensor | None = None, **inputs: Any) -> MaskedLMOutput:
        """Logits `[batch, tokens, vocabulary]`, and the mean cross-entropy in nats where there are labels.

        Args:
            input_ids: `[batch, tokens]`, some of them masked.
            labels: ids `[batch, tokens]` of what stood there, −100 where nothing is asked.
            inputs: see `LabModel.forward`.
        """
        logits = self.lm_head(self.model(input_ids, **inputs).last_hidden_state)
        return MaskedLMOutput(loss=_loss(logits, labels), logits=logits)


def _loss(logits: Tensor, labels: Tensor | None) -> Tensor | None:
    if labels is None:
        return None
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def _mask(attention_mask: Tensor, causal: bool) -> Tensor:
    """Where a position may look, `[batch, 1, tokens, tokens]`. Padding sees itself, since a softmax needs something."""
    tokens = attention_mask.shape[1]
    own = torch.eye(tokens, dtype=torch.bool, device=attention_mask.device)
    mask = attention_mask.bool()[:, None, None, :].expand(-1, 1, tokens, -1)
    return (mask.tril() if causal else mask) | own
