"""What can be chosen about a lab model, and which choices exclude each other."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PretrainedConfig

from depthprobe.errors import UsageError

__all__ = ["INITIALISATIONS", "NORMS", "PAIRS", "PLACEMENTS", "LabConfig"]

PLACEMENTS = ("pre", "post", "branch", "sandwich", "deepnorm", "none")
NORMS = ("layernorm", "rmsnorm", "batchnorm", "instancenorm")
INITIALISATIONS = ("xavier", "gpt2", "admin")
PAIRS = ("", "blocks", "sublayers")

_COUNTS = ("vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers", "num_attention_heads")
_CHOICES = {"placement": PLACEMENTS, "norm": NORMS, "initialisation": INITIALISATIONS, "parallel_pairs": PAIRS}


class LabConfig(PretrainedConfig):
    """The configuration of a lab model. Checked when it is made, and again when a model is made from it.

    Attributes:
        vocab_size, max_position_embeddings: rows of the two embedding tables.
        hidden_size: the width d of the residual stream.
        num_hidden_layers: the number of blocks L, each one attention and one MLP; pairs count as two.
        num_attention_heads: must divide the width.
        mlp_ratio: inner width of the MLP over d.
        placement: where the norms sit around a branch F:
            pre x + F(N(x)); post N(x + F(x)); branch x + N(F(x)); sandwich x + N'(F(N(x)));
            deepnorm N(αx + F(x)) with α = (2L)^(1/4) (Wang et al. 2022); none x + F(x).
        norm: layernorm, rmsnorm, batchnorm (over batch and positions), instancenorm (over positions).
        layernorm_scaling: the output of every norm before a branch times 1/√(l + 1), l the block's index from 0
            (Sun et al. 2025, who count from 1).
        residual_attention: the scores of the block before, as they go into its softmax but for the mask, are added
            to each block's own (RealFormer, He et al. 2021).
        qk_norm: an RMSNorm on the queries and on the keys of every head.
        initialisation: xavier, gpt2, or admin (Liu et al. 2020: post-LN with N(ω ⊙ x + F(x))); see `initialise`.
        parallel_pairs: "" one after another; "blocks": blocks 2i and 2i + 1 read the same state, and their updates
            are added; "sublayers": both attentions read the same state, then both MLPs do. In post-LN one norm
            follows the sum of two sublayers.
        causal: no position sees a later one; False for the masked language model.
        norm_eps: added to the variance.
        tie_word_embeddings: the head is the token table. Off, since a table that suits the head (standard deviation
            1/√d) gives branches of unit variance next to no stream to be added to.

    Raises:
        UsageError: a value or a combination of values that no model can have.
    """

    model_type = "depthprobe_lab"
    keys_to_ignore_at_inference: ClassVar[list[str]] = []

    vocab_size: int = 256
    max_position_embeddings: int = 256
    hidden_size: int = 64
    num_hidden_layers: int = 12
    num_attention_heads: int = 4
    mlp_ratio: float = 4.0
    placement: str = "pre"
    norm: str = "layernorm"
    layernorm_scaling: bool = False
    residual_attention: bool = False
    qk_norm: bool = False
    initialisation: str = "xavier"
    parallel_pairs: str = ""
    causal: bool = True
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        """Called by the dataclass that PretrainedConfig makes of its subclasses."""
        super().__post_init__(**kwargs)
        self.check()

    @property
    def inner_size(self) -> int:
        """The inner width of the MLP."""
        return round(self.mlp_ratio * self.hidden_size)

    @property
    def norm_before(self) -> bool:
        """Whether a norm stands before each branch."""
        return self.placement in ("pre", "sandwich")

    @property
    def norm_on_update(self) -> bool:
        """Whether a norm stands on what each branch adds."""
        return self.placement in ("branch", "sandwich")

    @property
    def norm_after(self) -> bool:
        """Whether a norm stands after each addition."""
        return self.placement in ("post", "deepnorm")

    @property
    def final_norm(self) -> bool:
        """Whether a norm stands before the head: where the stream is not normalised already, but for none.

        Nor after post-LN pairs of whole blocks, whose sum of two normalised states is not.
        """
        return self.placement in ("pre", "branch", "sandwich")

    @property
    def lab_remarks(self) -> tuple[str, ...]:
        """What a report on such a model should say about how it was built, as plain sentences."""
        words = [f"placement {self.placement}", self.norm, f"initialisation {self.initialisation}"]
        if self.layernorm_scaling:
            words.append("norms before branches times 1/√(l + 1)")
        if self.residual_attention:
            words.append("residual attention")
        if self.qk_norm:
            words.append("QK-norm")
        about = [f"Built by the lab with {', '.join(words)}."]
        if self.parallel_pairs:
            way = "blocks whose updates are added" if self.parallel_pairs == "blocks" else "attentions, then two MLPs"
            about.append(f"Each block of this report is a pair of the lab's: two {way}, side by side.")
        return tuple(about)

    def check(self) -> None:
        """Refuse what no model can have, with one line that says why."""
        for name in _COUNTS:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name}={value!r}", "a whole number of at least 1")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise UsageError(f"{name}={value!r}", ", ".join(choice or "an empty string" for choice in choices))
        width, heads = self.hidden_size, self.num_attention_heads
        if width % heads:
            raise UsageError(f"a width of {width} cannot be divided among {heads} heads", "heads that divide the width")
        if self.inner_size < 1:
            raise UsageError(f"mlp_ratio={self.mlp_ratio!r}", "an MLP of at least one unit")
        if self.norm_eps <= 0:
            raise UsageError(f"norm_eps={self.norm_eps!r}", "a number above 0")
        if self.causal and self.norm in ("batchnorm", "instancenorm"):
            raise UsageError(
                f"norm={self.norm!r} in a causal model: its statistics see later positions",
                "layernorm or rmsnorm",
                "or causal=False, the masked language model",
            )
        if self.layernorm_scaling and not self.norm_before:
            raise UsageError(
                f"layernorm_scaling with placement={self.placement!r}, where no norm stands before a branch",
                "placement pre or sandwich",
            )
        if self.initialisation == "admin" and self.placement != "post":
            raise UsageError(f"initialisation='admin' with placement={self.placement!r}", "placement post")
        if self.parallel_pairs and self.num_hidden_layers % 2:
            raise UsageError(
                f"parallel_pairs={self.parallel_pairs!r} with {self.num_hidden_layers} blocks", "an even number of them"
            )
