"""The content of a data set before it is prepared for a model. It is the same for every source.

Images: ``x_train`` uint8 [n, 28, 28] or [n, 3, 32, 32], ``y_train`` int64 [n], ``x_test``, ``y_test``.
HELOC: ``x_raw`` float32 [n, 23] with FICO's codes −7/−8/−9, ``y_raw`` int64 [n] (1 = good).
QNLI: ``train_question``, ``train_sentence`` object [n] of str, ``train_label`` int64 [n], and ``test_...``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

Content = Mapping[str, np.ndarray]

HELOC_FEATURES = (
    "ExternalRiskEstimate",
    "MSinceOldestTradeOpen",
    "MSinceMostRecentTradeOpen",
    "AverageMInFile",
    "NumSatisfactoryTrades",
    "NumTrades60Ever2DerogPubRec",
    "NumTrades90Ever2DerogPubRec",
    "PercentTradesNeverDelq",
    "MSinceMostRecentDelq",
    "MaxDelq2PublicRecLast12M",
    "MaxDelqEver",
    "NumTotalTrades",
    "NumTradesOpeninLast12M",
    "PercentInstallTrades",
    "MSinceMostRecentInqexcl7days",
    "NumInqLast6M",
    "NumInqLast6Mexcl7days",
    "NetFractionRevolvingBurden",
    "NetFractionInstallBurden",
    "NumRevolvingTradesWBalance",
    "NumInstallTradesWBalance",
    "NumBank2NatlTradesWHighUtilization",
    "PercentTradesWBalance",
)
