"""The lab's own tokenizer: every byte is a token, so ASCII text has one a character and nothing is unknown."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["END", "MASK", "byte_ids", "byte_tokenizer", "is_byte_tokenizer"]

END, MASK = "<|endoftext|>", "<|mask|>"


def byte_tokenizer(masked: bool = False, positions: int | None = None) -> Any:
    """A transformers tokenizer of 256 bytes, whose ids are the bytes' values, and an end-of-text token, 256.

    Args:
        masked: adds a mask token, 257.
        positions: the longest sequence that the model takes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: byte for byte, character in enumerate(_characters())}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([END, MASK] if masked else [END])
    names = {"bos_token": END, "eos_token": END} | ({"mask_token": MASK} if masked else {})
    length = {} if positions is None else {"model_max_length": positions}
    return PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False, **names, **length)


def byte_ids(text: str) -> NDArray[np.int32]:
    """What the tokenizer makes of a text without special tokens in it, a hundred times as fast."""
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)


def is_byte_tokenizer(tokenizer: Any) -> bool:
    """Whether a tokenizer is the lab's: then `byte_ids` gives its ids."""
    vocabulary = tokenizer.get_vocab()
    others = {END, MASK} & vocabulary.keys()
    return len(vocabulary) == 256 + len(others) and all(vocabulary.get(c) == b for b, c in enumerate(_characters()))


def _characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary: itself where it can be seen, else one above.

    GPT-2's table: printable Latin-1 characters stand for themselves, the others for U+0100 onwards in their order.
    """
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]
