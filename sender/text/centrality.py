"""How much passages have in common with the rest of their document: mean cosine of TF-IDF vectors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def centrality(passages: Sequence[Sequence[str]]) -> npt.NDArray[np.float64]:
    """Return each passage's mean cosine to the others, N numbers in [0, 1].

    Weights are tf * ln(1 + (N - n + 0.5) / (n + 0.5)), the idf of BM25 here. A passage without terms has 0, and so has
    one that is alone. The work is linear: the mean of cosines is the cosine to the sum of the unit vectors.
    """
    count = len(passages)
    vocabulary: dict[str, int] = {}
    numbered = np.array(
        [vocabulary.setdefault(term, len(vocabulary)) for passage in passages for term in passage], dtype=np.int64
    )
    if count < 2 or not vocabulary:  # noqa: PLR2004  (a mean over others needs one)
        return np.zeros(count)
    owners = np.repeat(np.arange(count), [len(passage) for passage in passages])
    cells, frequencies = np.unique(owners * len(vocabulary) + numbered, return_counts=True)
    rows, columns = np.divmod(cells, len(vocabulary))
    holders = np.bincount(columns, minlength=len(vocabulary))
    weights = frequencies * np.log1p((count - holders + 0.5) / (holders + 0.5))[columns]
    norms = np.sqrt(np.bincount(rows, weights**2, minlength=count))
    unit = weights / norms[rows]
    total = np.bincount(columns, unit, minlength=len(vocabulary))
    # Less the passage itself, whose cosine to itself is 1.
    shared = np.bincount(rows, unit * total[columns], minlength=count) - (norms > 0)
    return np.clip(shared / (count - 1), 0.0, 1.0)
