"""What an analysis leaves behind: one dataclass, its files, and its words."""

from depthprobe.report.schema import Report

__all__ = ["Report"]
