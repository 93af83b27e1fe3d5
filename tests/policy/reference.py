"""The policies once more, one row at a time, in plain Python: slow, and written from the definitions alone."""

from __future__ import annotations

from typing import NamedTuple

from hspark.core import (
    REASON_CONTAINS,
    REASON_EXTENDED,
    REASON_NO_MATCH,
    REASON_ONLY,
    REASON_VALUE,
    Chain,
)


class Row(NamedTuple):
    """One row of a chain, of its own length. sampled: slots that are no point masses."""

    tokens: list[int]
    survival: list[float]
    source: list[int]
    sampled: list[bool]
    reason: int


def rows_of(chain: Chain) -> list[Row]:
    """The rows of a chain that a policy returned, cut to their lengths."""
    rows = []
    assert chain.source is not None
    for b, n in enumerate(chain.length.tolist()):
        reason = REASON_ONLY if chain.reason is None else int(chain.reason[b])
        sampled = (~chain.point_mass[b, :n]).tolist()
        source = chain.source[b, :n].tolist()
        rows.append(Row(chain.tokens[b, :n].tolist(), chain.survival[b, :n].tolist(), source, sampled, reason))
    return rows


def acceptance_of(chain: Chain, b: int) -> list[float]:
    return chain.acceptance[b, : int(chain.length[b])].tolist()


def reference(name: str, model: Chain, free: Chain, price: float, score: float = 4.0) -> list[Row]:
    """What the policy called `name` keeps for each row."""
    result = []
    for b, (d, g) in enumerate(zip(rows_of(model), rows_of(free), strict=True)):
        result.append(_choose(name, d, g, acceptance_of(free, b), price, score))
    return result


def _choose(name: str, d: Row, g: Row, h: list[float], price: float, score: float) -> Row:
    match = len(g.tokens) > 0
    prefix = len(g.tokens) > len(d.tokens) and g.tokens[: len(d.tokens)] == d.tokens
    if name == "vanilla":
        return Row([], [], [], [], REASON_ONLY)
    if name == "model_only":
        return d._replace(reason=REASON_ONLY)
    if name == "ngram_only":
        return g._replace(reason=REASON_ONLY)
    if name == "extension" and prefix:
        return _joined(d, g, d.survival, h, REASON_EXTENDED)
    if not match:
        return d._replace(reason=REASON_NO_MATCH)
    if name == "extension":
        return d._replace(reason=REASON_ONLY)
    if name == "ngram_first":
        return g._replace(reason=REASON_ONLY)
    if name == "threshold":
        return (g if sum(g.survival) > score else d)._replace(reason=REASON_VALUE)
    if name in ("proposed", "expected_length") and prefix and d.tokens:
        best = [max(a, b) for a, b in zip(d.survival, g.survival, strict=False)]
        return _joined(g, g, best, h, REASON_CONTAINS)
    floor = 0.0 if name == "expected_length" else price
    values = [sum(max(s - floor, 0.0) for s in row.survival) for row in (d, g)]
    return (g if values[1] >= values[0] else d)._replace(reason=REASON_VALUE)


def _joined(head: Row, g: Row, survival: list[float], h: list[float], reason: int) -> Row:
    """`head` up to the length of `survival`, then g, whose survivals go on from the last one of `survival`."""
    n = len(survival)
    survival = list(survival)
    for k in range(n, len(g.tokens)):
        survival.append((survival[-1] if survival else 1.0) * h[k])
    return Row(
        head.tokens[:n] + g.tokens[n:],
        survival,
        head.source[:n] + g.source[n:],
        head.sampled[:n] + g.sampled[n:],
        reason,
    )
