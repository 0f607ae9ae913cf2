"""For authors of backends: the conformance suite, its cases and its reference."""

from headstock.testing.conformance import AttentionConformance, MLAConformance

__all__ = ["AttentionConformance", "MLAConformance"]
