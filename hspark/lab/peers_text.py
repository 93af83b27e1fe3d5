"""The report of `hspark bench peers` as text for people."""

from __future__ import annotations

from hspark.lab.bench_text import number, ratio, render_header, same_text, table, verdicts
from hspark.lab.peers import BASELINE, PeerRow, PeersReport

_SPEED = [
    ("arm", lambda row: row.arm.name),
    ("tok/s", lambda row: number(row.arm.tokens_per_second, 1)),
    (f"over {BASELINE}", lambda row: ratio(row.arm.speedup)),
    ("decode tok/s", lambda row: number(row.arm.decode_tokens_per_second, 1)),
    ("decode ratio", lambda row: ratio(row.arm.decode_speedup)),
    ("prefill tok/s", lambda row: number(row.arm.prefill_tokens_per_second, 0)),
    ("text", lambda row: same_text(row.arm)),
]


def _scaled(value: float | None, factor: float, digits: int) -> str:
    return "-" if value is None else number(value * factor, digits)


def _tokens_per_forward(row: PeerRow) -> float | None:
    seconds = row.arm.forward_seconds
    return None if seconds is None else row.arm.decode_tokens_per_second * seconds


def _start(row: PeerRow, name: str) -> float | None:
    return None if row.start is None else getattr(row.start, name)


_MACHINE = [
    ("arm", lambda row: row.arm.name),
    ("tok/forward", lambda row: number(_tokens_per_forward(row))),
    ("ms/forward", lambda row: _scaled(row.arm.forward_seconds, 1e3, 1)),
    ("floor ms", lambda row: _scaled(row.floor_seconds, 1e3, 1)),
    ("over floor", lambda row: "-" if row.over_floor is None else f"{row.over_floor:.2f}x"),
    ("start s", lambda row: number(_start(row, "seconds"), 1)),
    ("loading s", lambda row: number(_start(row, "loading_seconds"), 1)),
    ("peak MB", lambda row: _scaled(_start(row, "peak_bytes"), 1e-6, 0)),
    ("device MB", lambda row: _scaled(_start(row, "device_peak_bytes"), 1e-6, 0)),
]


def render_peers(report: PeersReport) -> str:
    """Header, speeds, what each arm costs, and whatever differed or is missing."""
    header = report.bench.header
    weights, kv = header["weight_bytes"] / 1e6, header["kv_bytes_per_token"] / 1e3
    lines = [
        f"floor     {weights:.0f} MB of weights and {kv:.1f} kB of keys and values per token of context, at "
        f"{report.bandwidth / 1e9:.1f} GB/s of measured copy bandwidth",
        *(f"left out  {name}: {why}" for name, why in report.missing.items()),
    ]
    failed = [
        f"no start-up figures of {row.arm.name}: {row.start.error}"
        for row in report.rows
        if row.start and row.start.error
    ]
    parts = [
        render_header(header) + "\n" + "\n".join(lines),
        f"speed, with ratios over {BASELINE}' plain generate and their 95 % bootstrap intervals over prompts\n\n"
        + table(_SPEED, report.rows),
        "per forward of the target, drafting included; first token and peak memory of a fresh process\n\n"
        + table(_MACHINE, report.rows),
        "\n".join([*failed, *verdicts(report.bench.batches[0])]),
    ]
    return "\n\n".join(parts)
