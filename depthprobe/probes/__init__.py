"""Probes watch an unmodified run: one file a theme. Each reduces what it sees to one number a sequence, on the spot."""

from depthprobe.probes.base import Batch, Probe, Step

__all__ = ["Batch", "Probe", "Step"]
