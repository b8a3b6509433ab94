"""How well pairs are told apart."""

import numpy as np


def equal_error_rate(embeddings_nE: np.ndarray, people_n: np.ndarray) -> float:
    """Of all pairs, the rate at which as many of one person are refused as of two are accepted; NaN without both."""
    one, other = np.triu_indices(len(people_n), 1)
    scores = (embeddings_nE @ embeddings_nE.T)[one, other]
    same = people_n[one] == people_n[other]
    if same.all() or not same.any():
        return float("nan")
    order = np.argsort(-scores, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(order) - 1)
    accepted = np.cumsum(same[order])[ends] / same.sum()
    false = np.cumsum(~same[order])[ends] / (~same).sum()
    refused = 1 - accepted
    at = int(np.argmax(false >= refused))
    if at == 0:
        return float((false[0] + refused[0]) / 2)
    # Between two thresholds, both rates are taken as straight lines.
    before, after = false[at - 1] - refused[at - 1], false[at] - refused[at]
    share = before / (before - after)
    return float(false[at - 1] + share * (false[at] - false[at - 1]))
