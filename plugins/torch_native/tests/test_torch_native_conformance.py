"""torch-native keeps the contract: every case that its offer gives rise to."""

from headstock.testing import AttentionConformance
from headstock_torch_native import OFFER


class TestTorchNative(AttentionConformance):
    backend = OFFER
