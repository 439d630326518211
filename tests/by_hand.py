"""A plain, separate evaluation of schedules: one full forward of the model a schedule, its blocks wrapped by hand.

Nothing of depthprobe is used but the schedule's own stages. The model's list of blocks is replaced for one forward by
a single module that does the schedule's arithmetic; each original block is called with what an unmodified forward
handed to it. The attention and the MLP of each architecture are written out as its paper and code say.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from families import FAMILIES, shake
from torch import Tensor, nn

from depthprobe import Checkpoint
from depthprobe.ablations.run import SweepSettings, Swept, sweep
from depthprobe.ablations.schedule import Schedule
from depthprobe.checkpoint import load
from depthprobe.corpus import Corpus
from depthprobe.verify import Anatomy, open_stream

__all__ = ["BY_HAND", "ByHand", "Hand", "corpus_of", "deep", "effects_by_hand", "opened", "swept"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Sublayer = Callable[[nn.Module, Tensor, Arguments], Tensor]


@dataclass(frozen=True)
class Hand:
    """One architecture: where its blocks are, what each sublayer adds, and the norms after the sums in post-LN."""

    blocks: str
    attention: Sublayer
    mlp: Sublayer
    norms: tuple[str, str] | None = None


def _llama_attention(block: nn.Module, x: Tensor, call: Arguments) -> Tensor:
    return block.self_attn(hidden_states=block.input_layernorm(x), **call[1])[0]


def _bert_attention(block: nn.Module, x: Tensor, call: Arguments) -> Tensor:
    return block.attention.output.dense(block.attention.self(x, attention_mask=call[0][0])[0])


BERT = Hand(
    "bert.encoder.layer",
    _bert_attention,
    lambda block, x, call: block.output.dense(block.intermediate(x)),
    ("attention.output.LayerNorm", "output.LayerNorm"),
)
BY_HAND = {
    "llama": Hand(
        "model.layers", _llama_attention, lambda block, x, call: block.mlp(block.post_attention_layernorm(x))
    ),
    "gemma3": Hand(
        "model.layers",
        lambda block, x, call: block.post_attention_layernorm(_llama_attention(block, x, call)),
        lambda block, x, call: block.post_feedforward_layernorm(block.mlp(block.pre_feedforward_layernorm(x))),
    ),
    "neox": Hand(
        "gpt_neox.layers",
        lambda block, x, call: block.attention(block.input_layernorm(x), **call[1])[0],
        lambda block, x, call: block.mlp(block.post_attention_layernorm(x)),
    ),
    "olmo2": Hand(
        "model.layers",
        lambda block, x, call: block.post_attention_layernorm(block.self_attn(hidden_states=x, **call[1])[0]),
        lambda block, x, call: block.post_feedforward_layernorm(block.mlp(x)),
    ),
    "opt-post": Hand(
        "model.decoder.layers",
        lambda block, x, call: block.self_attn(hidden_states=x, **call[1])[0],
        lambda block, x, call: block.fc2(torch.relu(block.fc1(x))),
        ("self_attn_layer_norm", "final_layer_norm"),
    ),
    "bert": BERT,
    "bert-headless": Hand("encoder.layer", BERT.attention, BERT.mlp, BERT.norms),
}


def deep(name: str, blocks: int, seed: int = 0) -> nn.Module:
    """The tiny model of a family with as many blocks as wanted; layer types go round."""
    config = FAMILIES[name.removesuffix("-headless")].config()
    config.num_hidden_layers = blocks
    if kinds := getattr(config, "layer_types", None):
        config.layer_types = (list(kinds) * blocks)[:blocks]
    auto = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    torch.manual_seed(seed)
    return shake(
        (transformers.AutoModel if name.endswith("-headless") else auto).from_config(
            config, attn_implementation="eager"
        )
    )


class ByHand:
    """A model whose schedules are evaluated one by one."""

    def __init__(self, model: nn.Module, hand: Hand, inputs: Tensor) -> None:
        self.model, self.hand, self.inputs = model, hand, inputs
        self.blocks = list(model.get_submodule(hand.blocks))
        self.calls: list[Arguments] = []
        handles = [
            block.register_forward_pre_hook(
                lambda module, args, kwargs: self.calls.append((args[1:], dict(kwargs))), with_kwargs=True
            )
            for block in self.blocks
        ]
        with torch.no_grad():
            self.output = self._forward()
        for handle in handles:
            handle.remove()
        self.last: Tensor

    def run(self, schedule: Schedule) -> tuple[Tensor, Tensor]:
        """The model's own output and its last state, with the schedule in place of the blocks."""
        place, _, name = self.hand.blocks.rpartition(".")
        parent, blocks = self.model.get_submodule(place), self.model.get_submodule(self.hand.blocks)
        setattr(parent, name, nn.ModuleList([_Whole(self, schedule)]))
        try:
            with torch.no_grad():
                output = self._forward()
        finally:
            setattr(parent, name, blocks)
        return output, self.last

    def _forward(self) -> Tensor:
        keywords = {} if "bert" in type(self.model).__name__.lower() else {"use_cache": False}
        found = self.model(input_ids=self.inputs, **keywords)
        return found.logits if hasattr(found, "logits") else found.last_hidden_state

    def apply(self, schedule: Schedule, x: Tensor) -> Tensor:
        for stage in schedule.stages:
            layers = [unit.layer for unit in stage]
            if len(stage) == 1:
                x = self._unit(stage[0].layer, stage[0].part, x)[0]
            elif schedule.combine == "weights":
                x = self._block(self._averaged(layers), layers[0], x)
            elif schedule.combine == "branch-sum":
                total = x
                for unit in stage:
                    total = total + self._unit(unit.layer, unit.part, x)[1]
                assert self.hand.norms is not None
                x = self.blocks[layers[-1]].get_submodule(self.hand.norms[stage[-1].part == "m"])(total)
            else:
                outputs = [self._unit(unit.layer, unit.part, x)[0] for unit in stage]
                if schedule.combine == "mean":
                    x = sum(outputs) / len(outputs)
                else:
                    x = x + sum(output - x for output in outputs)
        return x

    def _unit(self, layer: int, part: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """f(x) and, for a sublayer, its branch."""
        block = self.blocks[layer]
        if not part:
            z = self._block(block, layer, x)
            return z, z - x
        branch = (self.hand.attention if part == "a" else self.hand.mlp)(block, x, self.calls[layer])
        if self.hand.norms is None:
            return x + branch, branch
        return block.get_submodule(self.hand.norms[part == "m"])(x + branch), branch

    def _block(self, block: nn.Module, layer: int, x: Tensor) -> Tensor:
        args, kwargs = self.calls[layer]
        found = block(x, *args, **kwargs)
        return found if isinstance(found, Tensor) else found[0]

    def _averaged(self, layers: list[int]) -> nn.Module:
        made = copy.deepcopy(self.blocks[layers[0]])
        states = [self.blocks[layer].state_dict() for layer in layers]
        made.load_state_dict({name: sum(state[name] for state in states) / len(states) for name in states[0]})
        return made


class _Whole(nn.Module):
    """The only block of the model that runs a schedule."""

    def __init__(self, by_hand: ByHand, schedule: Schedule) -> None:
        super().__init__()
        self.apply_to = [by_hand, schedule]  # in a list: not a submodule

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        by_hand, schedule = self.apply_to
        by_hand.last = by_hand.apply(schedule, x)
        return by_hand.last


def effects_by_hand(by_hand: ByHand, schedules: Iterable[Schedule], unmodified: Schedule) -> dict[str, np.ndarray]:
    """Metric → `[sequences, schedules]`, in float64 from the logits and last states."""
    logits, last = (t.double() for t in by_hand.run(unmodified))
    assert torch.equal(logits, by_hand.output.double()), "the wrapper itself changes the model"
    targets = by_hand.inputs[:, 1:, None]
    found: dict[str, list[Tensor]] = {"delta_loss": [], "kl": [], "top1_agreement": [], "state_distance": []}
    for schedule in schedules:
        changed, end = (t.double() for t in by_hand.run(schedule))
        p, q = (t[:, :-1].log_softmax(dim=-1) for t in (logits, changed))
        found["state_distance"].append((1 - torch.cosine_similarity(end, last, dim=-1)).mean(dim=1))
        if p.shape[-1] > int(targets.max()):
            found["delta_loss"].append((p.gather(-1, targets) - q.gather(-1, targets))[..., 0].mean(dim=1))
            found["kl"].append((p.exp() * (p - q)).sum(dim=-1).mean(dim=1))
            found["top1_agreement"].append((p.argmax(dim=-1) == q.argmax(dim=-1)).double().mean(dim=1))
    return {name: torch.stack(columns, dim=1).numpy() for name, columns in found.items() if columns}


def corpus_of(inputs: Tensor) -> Corpus:
    return Corpus(inputs, None, "ids", "0" * 64, "none")


def opened(model: nn.Module | Checkpoint, inputs: Tensor) -> Anatomy:
    return open_stream(load(model, device="cpu"), inputs)


def swept(model: nn.Module | Checkpoint | Anatomy, inputs: Tensor, schedules: list[Schedule], **settings: Any) -> Swept:
    """depthprobe's own sweep."""
    anatomy = model if isinstance(model, Anatomy) else opened(model, inputs)
    return sweep(anatomy, corpus_of(inputs), schedules, SweepSettings(**settings))
