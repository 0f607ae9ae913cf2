"""torch-native keeps the contract: every case that its offer gives rise to."""

from headstock.testing import AttentionConformance


class TestTorchNative(AttentionConformance):
    backend = "torch-native"
