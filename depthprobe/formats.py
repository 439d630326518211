"""Checkpoints in transformers' own format, from a directory or from the hub, and what all openers share.

Random weights are never left in a model: a tensor that the files miss, or that has another shape, is an error.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import nn

from depthprobe.errors import CheckpointError, DepthprobeError
from depthprobe.placement import Placing, unmapped

__all__ = [
    "Objective",
    "Opened",
    "Options",
    "explained",
    "first_line",
    "load_weights",
    "objective_of",
    "open_pretrained",
    "read_tokenizer",
    "refuse_unsupported",
    "require",
    "some",
    "undisturbed",
    "weights_arguments",
]

Objective = Literal["causal", "masked"]


@dataclass(frozen=True)
class Options:
    """How to open a checkpoint.

    Attributes:
        dtype: the dtype of the weights; None keeps the checkpoint's.
        revision: branch, tag or commit of a hub checkpoint; None is its default branch.
        trust_remote_code: run Python code that comes with the checkpoint.
        attn_implementation: transformers' name of the attention kernel; None lets transformers choose.
        objective: the head to open, None for no head; "auto" concludes it from the checkpoint.
        placing: where the weights go; None for one device.
    """

    dtype: torch.dtype | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    attn_implementation: str | None = None
    objective: Objective | Literal["auto"] | None = "auto"
    placing: Placing | None = None


@dataclass(frozen=True, eq=False)
class Opened:
    """A model read from disk, on the CPU or where it was to be placed; `room` is what that left for activations."""

    model: nn.Module
    tokenizer: Any | None
    objective: Objective | None
    revision: str | None
    notes: tuple[str, ...]
    room: int | None = None


def open_pretrained(source: str, options: Options, *, local: bool) -> Opened:
    """A directory in transformers' format (`local`, never asks the network), or a hub id.

    Raises:
        CheckpointError: it cannot be found, read or completed, or depthprobe does not support it.
    """
    with undisturbed(local):
        pinned, cached_only = (None, True) if local else _pin(source, options.revision)
        where = {"revision": pinned, "local_files_only": cached_only}
        file = _config_file(source, where, local)
        _check_config(file, source)
        trust = options.trust_remote_code
        with explained(source, "its configuration cannot be used"):
            config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust, **where)
        refuse_unsupported(config, source)
        arguments = {"config": config, "trust_remote_code": trust, **where, **weights_arguments(options)}

        objective = options.objective
        if objective == "auto":
            objective = objective_of((config.architectures or [""])[0], config)
        room = None
        if options.placing is not None:
            placed, room = options.placing.arguments(_factory(objective), config, options.dtype, trust)
            arguments |= placed
        with contextlib.nullcontext() if room is None else unmapped():
            free = options.objective == "auto"
            model, notes, headless = _open_class(source, objective, arguments, may_lose_head=free)
        if not config.architectures and options.objective == "auto":
            notes = ("config.json names no architecture: opened without a head", *notes)
        tokenizer, more = read_tokenizer(source, config=config, trust_remote_code=trust, **where)
    revision = None if local else file.parent.name  # the hub's cache has a folder for each commit
    return Opened(model, tokenizer, None if headless else objective, revision, (*notes, *more), room)


def objective_of(architecture: str, config: Any) -> Objective | None:
    """What the head of a transformers class predicts: the next token, masked tokens, or None for no such head."""
    if architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return "causal"
    if architecture.endswith("ForConditionalGeneration"):
        # Multimodal decoders: given ids alone, they are language models.
        return "causal" if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING else None
    if architecture.endswith("ForMaskedLM"):
        return "masked"
    # ELECTRA was pre-trained to tell replaced tokens: its head predicts no token.
    if architecture.endswith("ForPreTraining") and config.model_type != "electra":
        return "masked" if type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING else None
    return None


def refuse_unsupported(config: Any, source: str) -> None:
    """Raises CheckpointError for a model with two stacks of blocks, or whose blocks change with the text's length."""
    if getattr(config, "is_encoder_decoder", False):
        raise CheckpointError(
            f"{source} is an encoder–decoder ({config.model_type}), whose two stacks have two residual streams",
            "a decoder or an encoder",
        )
    if getattr(config, "attention_type", None) == "block_sparse":  # BigBird, for good once a text is short
        found = f"{source} has block_sparse attention, which turns into another one on short texts"
        raise CheckpointError(found, "attention_type original_full in its config.json")


def read_tokenizer(source: str, **arguments: Any) -> tuple[Any | None, tuple[str, ...]]:
    """The tokenizer beside a checkpoint, and notes: None where there is none or where it cannot be read."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **arguments)
        # A folder without tokenizer files gives some classes an empty vocabulary instead of an error.
        return (tokenizer, ()) if len(tokenizer.get_vocab()) > len(tokenizer.all_special_tokens) else (None, ())
    except Exception as error:
        folder = Path(source)
        if folder.is_dir() and not any(folder.glob("tokenizer*")) and not arguments.get("gguf_file"):
            return None, ()
        return None, (f"the tokenizer could not be read: {first_line(error)}",)


def load_weights(
    factory: Any, source: str | None, what: str, **arguments: Any
) -> tuple[Any, set[str], tuple[str, ...]]:
    """The model that `factory` opens, the names of the tensors that no file had, and notes on those left over.

    Raises:
        CheckpointError: a file cannot be read, or a tensor has another shape than the model.
    """
    with explained(what, "its weights cannot be read"):
        model, info = factory.from_pretrained(
            source, output_loading_info=True, ignore_mismatched_sizes=True, **arguments
        )
    if info["mismatched_keys"]:
        name, stored, wanted = min(info["mismatched_keys"], key=str)
        raise CheckpointError(
            f"{len(info['mismatched_keys'])} tensors of {what} do not fit its configuration",
            f"{name} of shape {list(wanted)}, not {list(stored)}",
            "take weights and configuration from the same source",
        )
    if info.get("error_msgs"):
        raise CheckpointError(f"the weights of {what} cannot be used: {first_line(info['error_msgs'][0])}")
    unused = info["unexpected_keys"]
    note = f"the checkpoint holds {len(unused)} tensors that the opened model has no place for: {some(unused)}"
    return model, set(info["missing_keys"]), (note,) if unused else ()


def require(missing: set[str], what: str, model: nn.Module) -> None:
    """Raises CheckpointError if any tensor is missing."""
    if missing:
        raise CheckpointError(
            f"the weights of {what} miss {len(missing)} tensors: {some(missing)}",
            f"every tensor of {type(model).__name__}",
            "the download or the conversion is incomplete, get it again",
        )


def first_line(error: object) -> str:
    """The first sentence or two of a foreign error message, on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:199] + "…"


@contextlib.contextmanager
def explained(what: str, problem: str, fix: str | None = None) -> Iterator[None]:
    """Turn whatever a foreign loader raises into one CheckpointError."""
    try:
        yield
    except DepthprobeError:
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            fix = "--trust-remote-code (trust_remote_code=True in Python) runs that code: read it first"
            raise CheckpointError(f"{what} needs Python code that comes with it", fix=fix) from error
        if "offload_folder" in str(error):
            problem = "some weights have to be written anew to be fetched one by one"
            raise CheckpointError(f"{what}: {problem}", fix="--offload-folder says where") from error
        raise CheckpointError(f"{what}: {problem}: {first_line(error)}", fix=fix) from error


@contextlib.contextmanager
def undisturbed(local: bool) -> Iterator[None]:
    """Keep the libraries' chatter off the terminal and, for local files, off the network; leave nothing changed.

    The bars of a download are shown, on a terminal.
    """
    import huggingface_hub.constants as hub
    from transformers.utils import logging

    verbosity, offline, conversion = logging.get_verbosity(), hub.HF_HUB_OFFLINE, "DISABLE_SAFETENSORS_CONVERSION"
    before = os.environ.get(conversion)
    logging.set_verbosity_error()
    hub.HF_HUB_OFFLINE = offline or local
    os.environ[conversion] = "1"  # else a legacy checkpoint of the hub makes transformers open a pull request there
    shown = sys.stderr.isatty() and not local
    try:
        with contextlib.nullcontext() if shown else contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        hub.HF_HUB_OFFLINE = offline
        if before is None:
            del os.environ[conversion]
        else:
            os.environ[conversion] = before


def _pin(repository: str, revision: str | None) -> tuple[str | None, bool]:
    """The commit that a revision stands for, and whether only the cache can be used because the hub is out of reach.

    One request without retries: transformers itself would try for half a minute before it gives up.
    """
    from huggingface_hub import HfApi, errors

    try:
        return HfApi().model_info(repository, revision=revision, timeout=10).sha, False
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(
            f"{repository} has no revision {revision!r}", "a branch, tag or commit of that repository"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"the hub has no model {repository!r}, or it is private",
            fix="check the name, log in with `hf auth login` if it is private, or give a local path",
        ) from error
    except Exception:
        return revision, True


def _config_file(source: str, where: dict[str, Any], local: bool) -> Path:
    """The checkpoint's `config.json`, from the directory or through the hub's cache."""
    if local:
        return _config_in(Path(source))
    from huggingface_hub import errors, hf_hub_download

    try:
        return Path(hf_hub_download(source, "config.json", **where))
    except errors.LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{source!r} is neither a local path nor in the cache, and the hub cannot be reached",
            fix="check the name and the network connection, or download it elsewhere and give the directory's path",
        ) from error
    except errors.GatedRepoError as error:
        fix = "accept its terms on its page, then `hf auth login` or set HF_TOKEN"
        raise CheckpointError(f"{source} is gated: its owner decides who may read it", fix=fix) from error
    except errors.EntryNotFoundError as error:
        raise CheckpointError(f"{source} has no config.json", "a checkpoint in transformers' format") from error
    except Exception as error:
        raise CheckpointError(f"{source} cannot be fetched: {first_line(error)}") from error


def _config_in(folder: Path) -> Path:
    """The `config.json` of a directory that holds weights as well; an error that says what it holds instead."""
    if not (folder / "config.json").is_file():
        files = sorted(path.name for pattern in ("*.gguf", "*.pt", "*.pth") for path in folder.glob(pattern))
        fix = f"give the file itself: {some(files)}" if files else "save_pretrained writes one"
        if (folder / "adapter_config.json").is_file():
            fix = "it is an adapter: merge it into its base model and save that"
        raise CheckpointError(f"{folder} has no config.json", "a checkpoint in transformers' format", fix)
    if not any(path.stat().st_size for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern)):
        raise CheckpointError(
            f"{folder} has a config.json but no weights", "model.safetensors, its shards or pytorch_model.bin"
        )
    return folder / "config.json"


def _check_config(path: Path, source: str) -> None:
    """Raises CheckpointError for a `config.json` that is broken or of a type that transformers does not know."""
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the config.json of {source} cannot be read: {first_line(error)}") from error
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(model_type, str):
        raise CheckpointError(f'the config.json of {source} names no "model_type"', "a model in transformers' format")
    if model_type not in transformers.CONFIG_MAPPING and "auto_map" not in config:
        raise CheckpointError(
            f"{source} is of type {model_type!r}, which transformers {transformers.__version__} does not know",
            fix="a newer transformers may, or build the model in Python and give the module",
        )


def weights_arguments(options: Options) -> dict[str, Any]:
    """What `from_pretrained` is told about the weights."""
    arguments: dict[str, Any] = {"dtype": options.dtype or "auto"}
    if options.attn_implementation is not None:
        arguments["attn_implementation"] = options.attn_implementation
    return arguments


def _open_class(
    source: str, objective: Objective | None, arguments: dict[str, Any], *, may_lose_head: bool
) -> tuple[nn.Module, tuple[str, ...], bool]:
    """The model with the head of that objective, notes, and whether the head had to be left out."""
    factory = _factory(objective)
    model, missing, notes = load_weights(factory, source, source, **arguments)
    prefix = f"{model.base_model_prefix}."
    headless = bool(objective and may_lose_head and missing and not any(name.startswith(prefix) for name in missing))
    if headless:
        wanted = type(model).__name__
        model, missing, notes = load_weights(transformers.AutoModel, source, source, **arguments)
        notes = (f"the head of {wanted} is not in the checkpoint: opened without one", *notes)
    if missing and all(name.startswith("pooler.") for name in missing):
        model.pooler = None  # its output is not part of the stream, and random weights are worse than none
        missing = set()
    require(missing, source, model)
    return model, notes, headless


def _factory(objective: Objective | None) -> Any:
    """transformers' auto class for the head of that objective."""
    factories = {"causal": transformers.AutoModelForCausalLM, "masked": transformers.AutoModelForMaskedLM}
    return factories[objective] if objective else transformers.AutoModel


def some(names: Iterable[str], limit: int = 3) -> str:
    """The first few names, and how many more there are."""
    names = sorted(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
