"""One transformer with its norms where its configuration says, causal or bidirectional."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput, MaskedLMOutput

from depthprobe.errors import UsageError
from depthprobe.lab.blocks import Block, Pair
from depthprobe.lab.config import LabConfig
from depthprobe.lab.initialise import Matrix, embedding_std, fill
from depthprobe.lab.norms import Norm, make_norm
from depthprobe.lab.skip import Gain

__all__ = ["LabForCausalLM", "LabForMaskedLM", "LabModel"]


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
