"""One exception tree. Every message says what was found, what was expected and what to do about it."""

from __future__ import annotations

__all__ = [
    "AnatomyError",
    "CheckpointError",
    "CorpusError",
    "DepthprobeError",
    "GradientError",
    "NonFiniteError",
    "OutputError",
    "UsageError",
    "VerificationError",
]


class DepthprobeError(Exception):
    """Base of everything that depthprobe raises on purpose.

    Args:
        found: what is the case, in one clause.
        expected: what was needed instead.
        fix: what the user can do about it.
    """

    exit_code = 1
    everywhere = False  # raised in each of several processes, so that one of them may say it for all

    def __init__(self, found: str, expected: str | None = None, fix: str | None = None) -> None:
        self.found, self.expected, self.fix = found, expected, fix
        parts = [found, f"expected {expected}" if expected else "", fix or ""]
        super().__init__("; ".join(" ".join(part.split()) for part in parts if part))


class UsageError(DepthprobeError):
    """The request itself is wrong: an option's value, or two options that exclude each other."""

    exit_code = 2


class CheckpointError(DepthprobeError):
    """The checkpoint cannot be found, read or trusted."""


class CorpusError(DepthprobeError):
    """The text or the token ids cannot be used with this model."""


class AnatomyError(DepthprobeError):
    """The residual stream cannot be found in this model, or the model has more than one."""


class VerificationError(DepthprobeError):
    """What was found does not reproduce the model's own output."""


class NonFiniteError(DepthprobeError):
    """An activation is infinite or not a number."""

    @classmethod
    def of_change(cls, what: str, dtype: str, sequence: int) -> NonFiniteError:
        """The error for what a model gives on a state that is not its own."""
        return cls(
            f"{what} is not finite ({dtype}, sequence {sequence})",
            "finite activations",
            "leave it out" if dtype == "float32" else "try --dtype float32",
        )

    @classmethod
    def in_block(cls, block: int, unit: str, dtype: str, sequence: int, position: int) -> NonFiniteError:
        """The error for what one unit of a block wrote."""
        return cls(
            f"block {block} writes values that are not finite "
            f"({unit}, {dtype}, sequence {sequence}, position {position})",
            "finite activations",
            "the weights may be damaged" if dtype == "float32" else "try --dtype float32",
        )


class GradientError(DepthprobeError):
    """Something in the model has no derivative, or there is no room to take it."""


class OutputError(DepthprobeError):
    """The report cannot be written where it was asked for."""
