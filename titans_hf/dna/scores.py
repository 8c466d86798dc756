"""Accuracy, and Matthews' correlation coefficient for any number of classes."""

from collections.abc import Sequence
from math import sqrt


def accuracy(predicted: Sequence[int], wanted: Sequence[int]) -> float:
    """The share of rows with the right class."""
    return sum(p == w for p, w in zip(predicted, wanted, strict=True)) / len(wanted)


def mcc(predicted: Sequence[int], wanted: Sequence[int]) -> float:
    """Matthews' correlation coefficient: 1 where all is right, 0 for chance or one answer to everything.

    The covariance of predicted and wanted classes over the root of the product of their variances, with a class as a
    vector that is 1 at its number. For two classes it is the correlation of the two columns.
    """
    rows, classes = len(wanted), {*predicted, *wanted}
    said, true = ([list(column).count(k) for k in classes] for column in (predicted, wanted))
    right = sum(p == w for p, w in zip(predicted, wanted, strict=True))
    covariance = right * rows - sum(p * w for p, w in zip(said, true))
    variances = [rows**2 - sum(count**2 for count in counts) for counts in (said, true)]
    return covariance / sqrt(variances[0] * variances[1]) if all(variances) else 0.0
