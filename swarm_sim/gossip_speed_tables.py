"""How fast exchanges are, from the numbers of `bench gossip`, as tables for docs/gossip.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

Numbers = Mapping[str, Any]
COMPARISONS: Final = {
    "loopback_1m": "loopback, bf16",
    "loopback_10m": "loopback, bf16",
    "loopback_50m": "loopback, bf16",
    "four_10m": "loopback, bf16, four peers (ours: two rounds of two pairs)",
    "wan_10m": "100 Mbit/s, 40 ms, int8",
    "wan_50m": "100 Mbit/s, 40 ms, int8",
}
LINK_BYTES_PER_S: Final = 100e6 / 8  # of the emulated link (gossip_link.py, which only Linux can import)
_GOALS: Final = (
    ("10M on loopback, times as fast as hivemind's averager", "loopback_10m_speedup", "≥ 2.5"),
    ("the same, times less CPU", "loopback_10m_cpu_ratio", "≥ 2.5"),
    ("10M over the link, int8, times as fast", "wan_10m_speedup", "≥ 5"),
    ("50M over the link, share of it that the payload fills", "wan_link_share", "≥ 0.85"),
    ("training speed during back-to-back exchanges, by wall time", "train_during_exchange", "≥ 0.97"),
    ("the same per CPU second of the training thread", "train_during_exchange_cpu", ""),
)


def tables(numbers: Numbers) -> str:
    """Of the parts that compare speeds, those that a file has."""
    goals = [(name, numbers[key], goal) for name, key, goal in _GOALS if numbers.get(key) is not None]
    out = _table(("What", "Measured", "Goal"), goals)
    heading = ("Parameters", "Where", "ours: s, CPU s", "hivemind: s, CPU s", "in fp16: s", "times as fast", "spread", "times less CPU")
    rows = [_comparison(numbers, key) for key in COMPARISONS if numbers.get(f"{key}_speedup") is not None]
    if rows:
        out += "\n" + _table(heading, rows)
    links = [
        (
            f"{numbers[f'{key}_parameters'] / 1e6:.1f}M",
            numbers[f"{key}_ours_bytes"] / LINK_BYTES_PER_S,
            *(numbers[f"{key}_ours_{phase}_s"] for phase in ("agree", "transfer", "settle")),
            numbers[f"{key}_link_share"],
            numbers[f"{key}_lanes"],
            4 * numbers[f"{key}_parameters"] / LINK_BYTES_PER_S,
        )
        for key in ("wan_10m", "wan_50m")
        if numbers.get(f"{key}_ours_transfer_s") is not None
    ]
    if links:
        heading = (
            "Over the link", "payload at its rate: s", "ours: to the first chunk", "to the verified digest", "to the end",
            "share of the link", "streams", "hivemind's payload at its rate: s",
        )  # fmt: skip
        out += "\n" + _table(heading, links)
    return out


def _comparison(numbers: Numbers, key: str) -> list[object]:
    def get(what: str) -> Any:
        return numbers[f"{key}_{what}"]

    return [
        f"{get('parameters') / 1e6:.1f}M",
        COMPARISONS[key],
        f"{_shown(get('ours_s'))}, {_shown(get('ours_cpu_s'))}",
        f"{_shown(get('theirs_s'))}, {_shown(get('theirs_cpu_s'))}",
        get("theirs_fp16_s"),
        get("speedup"),
        f"{_shown(get('speedup_low'))} … {_shown(get('speedup_high'))}",
        get("cpu_ratio"),
    ]


def _table(heading: Sequence[object], rows: Iterable[Iterable[object]]) -> str:
    def line(cells: Iterable[object]) -> str:
        return "| " + " | ".join(map(_shown, cells)) + " |\n"

    return line(heading) + line("---" for _ in heading) + "".join(line(row) for row in rows)


def _shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
