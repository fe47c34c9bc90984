"""How many elements each gradient of a model has, in the order of its parameters."""

from __future__ import annotations


def resnet50() -> list[int]:
    """Return the sizes of ResNet-50's 161 gradients, 25.6 million elements."""
    found = [64 * 3 * 49, 64, 64]
    inner = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            found += [inner * width, width, width, width * width * 9, width, width]
            found += [width * 4 * width, 4 * width, 4 * width]
            if block == 0:
                found += [inner * 4 * width, 4 * width, 4 * width]
            inner = 4 * width
    return [*found, 2048 * 1000, 1000]


def gpt2() -> list[int]:
    """Return the sizes of GPT-2's 148 gradients, 124 million elements."""
    d = 768
    layer = [d, d, 3 * d * d, 3 * d, d * d, d, d, d, 4 * d * d, 4 * d, 4 * d * d, d]
    return [50257 * d, 1024 * d, *layer * 12, d, d]


MODELS = {"ResNet-50": resnet50, "GPT-2": gpt2}
