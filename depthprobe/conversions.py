"""Single-file checkpoints of other programs, made into the transformers model that computes the same.

nanoGPT's `ckpt.pt` becomes a GPT-2. A `.gguf` is dequantised by transformers, whose result is checked against the
file here: its loader drops, without a word, hyperparameters and tensors that it has no name for.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from depthprobe.errors import CheckpointError
from depthprobe.formats import (
    Objective,
    Opened,
    Options,
    explained,
    first_line,
    load_weights,
    read_tokenizer,
    refuse_unsupported,
    require,
    some,
    undisturbed,
    weights_arguments,
)

__all__ = ["open_gguf", "open_nanogpt"]

# nanoGPT's name of a size, and that of GPT2Config.
_NANOGPT_SIZES = {
    "n_layer": "n_layer",
    "n_head": "n_head",
    "n_embd": "n_embd",
    "block_size": "n_positions",
    "vocab_size": "vocab_size",
}
_NANOGPT_BIASED = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")

# A gguf's hyperparameter (after the architecture's name), and the attributes of a config that can hold it.
_GGUF_SETTINGS = {
    "vocab_size": ("vocab_size",),
    "context_length": ("max_position_embeddings",),
    "block_count": ("num_hidden_layers",),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads"),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "layer_norm_epsilon", "norm_eps"),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon"),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
}
# Pre-tokenizers that split text as GPT-2 does, or finer in a way that the merges of their vocabulary respect anyway.
_GPT2_LIKE = {"gpt-2", "mpt", "olmo", "phi-2", "smollm", "starcoder", "refact", "command-r"}


def open_gguf(path: Path, options: Options) -> Opened:
    """A `.gguf` file, dequantised (to float32 unless the options say otherwise).

    Raises:
        CheckpointError: the file is broken, the packages that read it are missing, its architecture is unknown to
            transformers, or what transformers made of it does not hold all that the file holds.
    """
    if not all(importlib.util.find_spec(package) for package in ("gguf", "accelerate")):
        raise CheckpointError(
            f"{path} needs the packages gguf and accelerate", fix='install them: pip install "depthprobe[gguf]"'
        )
    reader, metadata = _read_gguf(path)
    sizes = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
    architecture = str(metadata.get("general.architecture"))
    settings = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()}
    where = {"gguf_file": path.name, "local_files_only": True}
    what, folder = str(path), str(path.parent)
    with undisturbed(local=True), _parsed_once(reader):
        with explained(what, f"transformers cannot read a gguf of architecture {architecture!r}"):
            config = transformers.AutoConfig.from_pretrained(folder, **where)
        refuse_unsupported(config, what)
        notes = (f"dequantised from {path.name}", *_correct(config, settings, what), *_imply(config, settings))
        objective: Objective | None = "causal" if options.objective == "auto" else options.objective
        factory = transformers.AutoModelForCausalLM if objective == "causal" else transformers.AutoModel
        arguments = {**where, "config": config, **weights_arguments(options), "dtype": options.dtype or torch.float32}
        model, missing, more = load_weights(factory, folder, what, **arguments)
        require(missing, what, model)
        tokenizer, unread = read_tokenizer(folder, **where)
    if objective == "causal":
        _count(model, sizes, what)
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            notes += (_scale_rotary(model, torch.tensor(tensor.data), what),)
    split = metadata.get("tokenizer.ggml.pre")
    if tokenizer is not None and metadata.get("tokenizer.ggml.model") == "gpt2" and not _splits_alike(str(split)):
        unread += (f"transformers does not know the pre-tokenizer {split!r} of the file and splits text as GPT-2 does",)
    return Opened(model, tokenizer, objective, None, (*notes, *more, *unread))


def open_nanogpt(path: Path, options: Options) -> Opened:
    """nanoGPT's `ckpt.pt` as the GPT-2 of transformers that computes the same.

    Linear weights are transposed (GPT-2 stores them as `[in, out]`); a checkpoint without biases gets zeros.

    Raises:
        CheckpointError: the file holds something else, or its tensors do not fit its `model_args`.
    """
    saved = _unpickled(path)
    if not isinstance(saved, dict) or not {"model", "model_args"} <= saved.keys():
        holds = f"the keys {some(map(str, saved))}" if isinstance(saved, dict) else f"a {type(saved).__name__}"
        raise CheckpointError(
            f"{path} holds {holds}",
            'a nanoGPT checkpoint, a dictionary with "model" and "model_args"',
            "export other models with save_pretrained and give the directory",
        )
    sizes = saved["model_args"] if isinstance(saved["model_args"], dict) else {}
    if not all(isinstance(sizes.get(name), int) and sizes[name] > 0 for name in _NANOGPT_SIZES):
        raise CheckpointError(f"model_args in {path} is incomplete", f"positive numbers {', '.join(_NANOGPT_SIZES)}")
    weights = _nanogpt_weights(saved["model"], path)
    head, embedding = weights.get("lm_head.weight"), weights.get("transformer.wte.weight")
    tied = head is None or (embedding is not None and torch.equal(head, embedding))
    if tied:
        weights.pop("lm_head.weight", None)
    with undisturbed(local=True):
        with explained(str(path), "its model_args cannot be used"):
            config = transformers.GPT2Config(
                **{theirs: sizes[ours] for ours, theirs in _NANOGPT_SIZES.items()},
                activation_function="gelu",
                tie_word_embeddings=tied,
                bos_token_id=None,
                eos_token_id=None,
                architectures=["GPT2LMHeadModel"],
            )
        arguments = {"config": config, "state_dict": weights, **weights_arguments(options)}
        model, missing, notes = load_weights(transformers.GPT2LMHeadModel, None, str(path), **arguments)
    require(missing, str(path), model)
    if notes:
        raise CheckpointError(
            f"{path} is of a model that is not nanoGPT's: {notes[0]}", "nanoGPT's own tensors", "convert it yourself"
        )
    origin = "converted from nanoGPT to transformers' GPT-2, with the exact GELU of nanoGPT's present code"
    return Opened(model, None, "causal", None, (origin,))


def _read_gguf(path: Path) -> tuple[Any, dict[str, Any]]:
    """A `gguf.GGUFReader` of the file, and its metadata without the lists.

    Raises:
        CheckpointError: it is no gguf, is cut short, is a part of one, or holds what transformers cannot express.
    """
    import gguf

    with explained(str(path), "it is not a gguf file or is cut short", "get it again"):
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise CheckpointError(f"{path} is not a gguf file", 'one that begins with the bytes "GGUF"')
        reader = gguf.GGUFReader(path)
        array = gguf.GGUFValueType.ARRAY
        metadata = {name: field.contents() for name, field in reader.fields.items() if array not in field.types}
    if (parts := metadata.get("split.count", 1)) > 1:
        raise CheckpointError(f"{path} is one of {parts} parts", fix="merge them with llama-gguf-split --merge")
    if any(tensor.name.startswith(("rope_factors_long", "rope_factors_short")) for tensor in reader.tensors):
        raise CheckpointError(
            f"{path} scales its rotary embedding by length, which transformers' gguf loader drops",
            fix="use the checkpoint in transformers' format",
        )
    return reader, metadata


@contextlib.contextmanager
def _parsed_once(reader: Any) -> Iterator[None]:
    """Spare transformers parsing the same file three times and naming its tensors anew for each module.

    That was most of the time that a small file takes to load.
    """
    import gguf

    before = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = lambda *_, **__: reader, functools.cache(gguf.get_tensor_name_map)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = before


def _correct(config: Any, settings: Mapping[str, Any], what: str) -> tuple[str, ...]:
    """Set what transformers read differently from the file's metadata; a note for each."""
    notes = []
    for key, names in _GGUF_SETTINGS.items():
        stated = settings.get(key)
        name = next((name for name in names if getattr(config, name, None) is not None), None)
        if stated is None or name is None or _same(getattr(config, name), stated):
            continue
        notes.append(f"transformers read {name} = {getattr(config, name)} where the file says {stated}: corrected")
        setattr(config, name, stated)

    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    base, kind = settings.get("rope.freq_base"), settings.get("rope.scaling.type", "none")
    if base is not None and "rope_theta" in rope and not _same(rope["rope_theta"], base):
        notes.append(f"transformers read rope_theta = {rope['rope_theta']} where the file says {base}: corrected")
        rope["rope_theta"] = base
    if kind != "none" and rope.get("rope_type", "default") == "default":
        raise CheckpointError(
            f"{what} has a rotary embedding with {kind} scaling, which transformers' gguf loader drops",
            fix="use the checkpoint in transformers' format",
        )
    return tuple(notes)


def _imply(config: Any, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Set what follows from the file without standing in it, where transformers leaves its default; a note for each.

    Gemma 2 of 27B divides attention scores by √(width / heads), as llama.cpp knows by its 46 blocks; its smaller models
    by √256, which is the default.
    """
    implied: dict[str, Any] = {}
    kind, window = config.model_type, settings.get("attention.sliding_window")
    if kind == "phi3" and window:
        implied["sliding_window"] = window
    if kind == "mistral" and not window:
        implied["sliding_window"] = None
    if kind == "gemma2" and config.num_hidden_layers == 46:
        implied["query_pre_attn_scalar"] = config.hidden_size // config.num_attention_heads
    notes = []
    for name, value in implied.items():
        if getattr(config, name) != value:
            notes.append(f"{name} = {value}, as llama.cpp reads such a file; transformers took {getattr(config, name)}")
            setattr(config, name, value)
    return tuple(notes)


def _same(read: Any, stated: Any) -> bool:
    if isinstance(read, int | float) and isinstance(stated, int | float):
        return math.isclose(read, stated, rel_tol=1e-6)
    return isinstance(stated, str) or read == stated


def _count(model: Any, sizes: Mapping[str, int], what: str) -> None:
    """Raises CheckpointError unless the model has as many parameters as the file: none dropped, none invented."""
    taken = sum(parameter.numel() for parameter in model.parameters())
    tied = model.config.tie_word_embeddings
    aside = {"rope_freqs.weight", "output.weight"} if tied else {"rope_freqs.weight"}
    held = sum(size for name, size in sizes.items() if name not in aside)
    if taken != held:
        raise CheckpointError(
            f"{what} holds {held:,} weights and the {type(model).__name__} that transformers made of it has {taken:,}",
            "the same number: its gguf loader has dropped some",
            "use the checkpoint in transformers' format",
        )


def _scale_rotary(model: nn.Module, factors: torch.Tensor, what: str) -> str:
    """Divide the rotary frequencies by the file's factors (Llama 3.1 and later), which transformers leaves out."""
    rotary = [module for module in model.modules() if isinstance(getattr(module, "inv_freq", None), torch.Tensor)]
    if not rotary or any(module.inv_freq.shape != factors.shape for module in rotary):
        raise CheckpointError(f"{what} has factors for its rotary frequencies that do not fit {type(model).__name__}")
    for module in rotary:
        for name in ("inv_freq", "original_inv_freq"):
            if isinstance(frequencies := getattr(module, name, None), torch.Tensor):
                setattr(module, name, frequencies / factors.to(frequencies))
    return "rotary frequencies divided by the factors of the file, which transformers' gguf loader leaves out"


def _splits_alike(pre_tokenizer: str) -> bool:
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as known
    except ImportError:
        known = {}
    return pre_tokenizer in known or pre_tokenizer in _GPT2_LIKE


def _unpickled(path: Path) -> Any:
    """The tensors and plain values of a file of `torch.save`; code in it is never run."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected pickle protocol")  # said better by the error that follows
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is not a file of tensors and plain values alone; anything else could run code when opened",
            "a nanoGPT checkpoint",
            "save the model with save_pretrained, or build it in Python and give the module",
        ) from error
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}", "a nanoGPT checkpoint") from error


def _nanogpt_weights(saved: Any, path: Path) -> dict[str, torch.Tensor]:
    """nanoGPT's state dict under the names and in the layout of transformers' GPT-2."""
    if not isinstance(saved, dict) or not all(isinstance(value, torch.Tensor) for value in saved.values()):
        raise CheckpointError(f'"model" in {path} is not a state dict', "tensors by name")
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in saved.items():
        name = re.sub(r"^(_orig_mod\.|module\.)+", "", name)
        if name.endswith((".attn.bias", ".attn.masked_bias")):  # the causal mask, a buffer
            continue
        transposed = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) and tensor.ndim == 2
        weights[name] = tensor.t().contiguous() if transposed else tensor
    if not any(name.endswith(".bias") for name in weights):
        biased = tuple(f".{part}.weight" for part in (*_NANOGPT_BIASED, "ln_f"))
        for name, weight in list(weights.items()):
            if name.endswith(biased):
                weights[name.removesuffix("weight") + "bias"] = weight.new_zeros(weight.shape[-1])
    return weights
