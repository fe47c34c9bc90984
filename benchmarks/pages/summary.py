"""Medians, spread and ratios of samples that were taken in rounds."""

import statistics
from collections.abc import Sequence


def median(samples: Sequence[float]) -> float:
    """Return the median of `samples`."""
    return statistics.median(samples)


def quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile; of a single sample, that sample twice."""
    if len(samples) < 2:
        return samples[0], samples[0]
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
    return first, third


def ratios(samples: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Divide round by round: a disturbance of the machine in a round affects both values, and cancels."""
    if len(samples) != len(baseline):
        raise ValueError(f"{len(samples)} samples cannot be compared round by round with {len(baseline)}")
    return [sample / base for sample, base in zip(samples, baseline, strict=True)]


def differences(samples: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Subtract round by round."""
    if len(samples) != len(baseline):
        raise ValueError(f"{len(samples)} samples cannot be compared round by round with {len(baseline)}")
    return [sample - base for sample, base in zip(samples, baseline, strict=True)]
