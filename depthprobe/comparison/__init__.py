"""Several models side by side: against relative depth, at equal tokens and equal loss, and what they say of claims."""

from depthprobe.comparison.build import compare

__all__ = ["compare"]
