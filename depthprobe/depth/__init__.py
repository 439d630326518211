"""Effective depth: one file an estimator, each a plain function from a verified model and a corpus to an `Estimate`."""
