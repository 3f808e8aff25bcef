"""The numbers of `bench quality` and `bench ideas` as tables for docs/: what the page says is what a file of measured numbers says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from blocktrain.swarm_sim.lab.judge import WAYS

Numbers = Mapping[str, Any]
_ROWS: Final = (
    ("each block alone", "block_ce"),
    ("chain: mean of the blocks' log-probabilities", "chain_ce"),
    ("chain: mean of the blocks' probabilities", "chain_mixture_ce"),
    ("chain, weights averaged along the last quarter", "chain_averaged_ce"),
    ("each plain block alone", "control_block_ce"),
    ("control: plain blocks, averaged like the chain", "control_ce"),
    ("end to end, as deep as all blocks together", "reference_ce"),
    ("end to end, weights averaged along the last quarter", "reference_averaged_ce"),
    ("order-5 byte n-gram, counted on all the text", "ngram_ce"),
    ("paper's objective, σ 1-10, from noise: after each block", "literal_block_ce"),
    ("paper's objective: mean of the blocks", "literal_mean_ce"),
    ("noise at every position, σ 3-30, from noise: last block", "true_noise_last_ce"),
    ("noise at every position: mean of the blocks", "true_noise_mean_ce"),
    ("paper's objective, σ 0.002-2: each block, with the true target in z", "leak_local_block_ce"),
    ("the same over all σ of the run, each read by the block that owns it", "leak_local_ce"),
    ("the same chain from noise, last block", "leak_from_noise_ce"),
)


def quality(numbers: Numbers) -> str:
    """Tables of one run of `bench quality`, of the parts that it has."""
    out = f"{_settings(numbers)}\n\n"
    if numbers.get("chain_ce") is not None:
        out += _table(("What is read", "CE"), ((name, numbers[key]) for name, key in _ROWS if numbers.get(key) is not None))
        out += (
            f"\nGap {numbers['gap_mean']:+.3f} (spread {numbers['gap_spread']:.3f}); control's gap {numbers['control_gap']:+.3f} "
            f"(spread {numbers['control_gap_spread']:.3f}); chain minus control {numbers['chain_minus_control']:+.4f}; weights of the "
            f"blocks learned on half of the windows gain {numbers['chain_weighted_gain']:+.4f} on the other half.\n\n"
            f"AdamW's state: {numbers['adamw_bytes_block']:,} bytes a block, {numbers['adamw_bytes_full']:,} for all; parameters, "
            f"gradients and moments of a block {numbers['train_bytes_block']:,} bytes, and {numbers['paper_train_gib_block']:.3f} GiB at "
            "the paper's shape.\n\n"
        )
        out += _columns(
            numbers, ("σ", "sigma"), ("nats that z gives about a byte", "sigma_given"), ("nats lost by trusting pure noise", "sigma_lost")
        )
    if numbers.get("sigma_range") is not None:
        steps = numbers["table_steps"]
        out += f"\nAt {steps} steps, seed 0:\n\n"
        out += _columns(numbers, ("paper's objective, σ", "sigma_range"), ("last", "sigma_range_last_ce"), ("mean", "sigma_range_mean_ce"))
        out += "\n" + _columns(
            numbers, ("twelve layers", "depth"), ("paper's objective", "depth_literal_ce"), ("`evidence`", "depth_evidence_ce"),
            ("bytes to train a block", "depth_train_bytes_block"),
        )  # fmt: skip
        out += "\n" + _columns(numbers, ("two replicas of one block", "replicas"), ("CE", "replicas_ce"))
        out += "\n" + _columns(numbers, ("two replicas, shards that differ", "federated"), ("CE", "federated_ce"))
    if numbers.get("judge_true_text") is not None:
        rows = [(way.name, numbers[f"judge_{way.name}"], numbers[f"tokens_per_traversal_{way.name}"]) for way in WAYS]
        out += "\n" + _table(("way", "judge, nats a byte", "bytes a traversal"), [("true text", numbers["judge_true_text"], ""), *rows])
    if numbers.get("kept") is not None:
        out += f"\n{numbers['vocabulary']:,} tokens, {numbers['vocabulary_steps']} steps, seed 0; CE is nats a token:\n\n"
        columns = [numbers[key] for key in ("kept", "kept_bytes", "kept_ce_error", "kept_distance")]
        sparse = [(str(kept), size, f"{error:+.4f}", f"{far:.4f}") for kept, size, error, far in zip(*columns, strict=True)]
        whole = ("all", numbers["vocabulary_dense_bytes"], f"(CE {numbers['vocabulary_dense_ce']:.3f})", "")
        heading = ("tokens that travel", "bytes a position", "CE more than whole rows", "total variation from whole rows")
        out += _table(heading, [whole, *sparse])
    return out


def ideas(numbers: Numbers) -> str:
    """A row for each idea of one run of `bench ideas`."""
    keys = ("chain_ce", "control_ce", "reference_ce", "gap", "averaged_chain_ce", "weighted_gain", "cpu_ms_step", "adamw_bytes_block")
    names = [key.removesuffix("_chain_ce") for key in numbers if key.endswith("_chain_ce") and "averaged" not in key]
    rows = [(name, *(numbers[f"{name}_{key}"] for key in keys)) for name in names if numbers[f"{name}_chain_ce"] is not None]
    heading = (
        "idea",
        "chain",
        "control",
        "end to end",
        "gap",
        "chain, tail-averaged",
        "learned weights gain",
        "CPU ms a step",
        "AdamW bytes",
    )
    return f"{_settings(numbers)}\n\n{_table(heading, rows)}"


def _settings(numbers: Numbers) -> str:
    seeds = numbers.get("seeds")
    return f"{numbers['preset']}, {numbers['steps']} steps, seeds {', '.join(map(str, seeds)) if seeds else 'by default'}:"


def _columns(numbers: Numbers, *columns: tuple[str, str]) -> str:
    return _table([name for name, _ in columns], zip(*(numbers[key] for _, key in columns), strict=True))


def _table(heading: Sequence[object], rows: Iterable[Iterable[object]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "".join("| " + " | ".join(map(_shown, line)) + " |\n" for line in lines)


def _shown(value: object) -> str:
    if isinstance(value, list):
        return " · ".join(map(_shown, value))
    return f"{value:.3f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
