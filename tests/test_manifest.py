"""The manifest: round trips, a digest that never changes by itself, and refusals that name the key."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktrain.protocol import limits, manifest, wire
from blocktrain.protocol.errors import Malformed
from blocktrain.protocol.ids import RunId, run_name
from blocktrain.protocol.manifest import Schedule

RUN_TOML = """
format = 1
name = "demo"
blocks = 3
objective = "evidence"
tokenizer = "bytes"
seed = 7

[model]
width = 128
layers = 2
heads = 4
context = 128
vocabulary = 256

[noise]
sigma_low = 0.2
sigma_high = 4.0
overlap = 0.1
window_share = 0.25

[schedule]
steps_per_round = 20
learning_rate = 4e-3
warmup_rounds = 5
planned_rounds = 100
floor = 0.1

[optimizer]
batch = 8
accumulate = 1
beta1 = 0.9
beta2 = 0.95
weight_decay = 0.05
clip = 1.0
warmup_steps = 20
recompute = false
"""
FROZEN_RUN = "1cc311abcb6d5a0fc54fe5be9187286e6d3dbc0f65054e9f23b1a873410a6500"  # changing it would orphan every run that exists

# One other valid value for each field (format has only one)
OTHERS: dict[str, object] = {
    "name": "demo2", "blocks": 4, "objective": "autoregressive", "seed": 8,
    "model.width": 64, "model.layers": 3, "model.heads": 8, "model.context": 64,
    "noise.sigma_low": 0.3, "noise.sigma_high": 5.0, "noise.overlap": 0.2, "noise.window_share": 0.3,
    "schedule.steps_per_round": 21, "schedule.learning_rate": 3e-3, "schedule.warmup_rounds": 6, "schedule.planned_rounds": 101,
    "schedule.floor": 0.2,
    "optimizer.batch": 16, "optimizer.accumulate": 2, "optimizer.beta1": 0.8, "optimizer.beta2": 0.99, "optimizer.weight_decay": 0.0,
    "optimizer.clip": 2.0, "optimizer.warmup_steps": 0, "optimizer.recompute": True,
    "averaging": {"outer": "noloco"}, "grams": {"longest": 6, "rows": 4096, "row_width": 24},
}  # fmt: skip


def table() -> dict[str, Any]:
    return tomllib.loads(RUN_TOML)


def changed(**changes: object) -> dict[str, Any]:
    """The table with `section__key=value` changed."""
    out = table()
    for name, value in changes.items():
        put(out, name.replace("__", "."), value)
    return out


def put(out: dict[str, Any], name: str, value: object) -> None:
    *section, key = name.split(".")
    (out[section[0]] if section else out)[key] = value


def names() -> Iterator[str]:
    for key, value in table().items():
        yield key
        if isinstance(value, dict):
            yield from (f"{key}.{inner}" for inner in value)


def test_a_manifest_comes_back_from_its_bytes() -> None:
    run = manifest.from_table(table())
    assert manifest.from_bytes(run.to_bytes()) == run
    assert manifest.from_bytes(run.to_bytes(), run.run) == run


def test_the_digest_of_a_known_manifest_never_changes() -> None:
    assert manifest.from_table(table()).run.hex() == FROZEN_RUN
    assert run_name(manifest.from_table(table()).run) == FROZEN_RUN[:12]


def test_a_plain_mean_is_the_same_run_whether_it_is_said_or_not() -> None:
    said = manifest.from_table({**table(), "averaging": {"outer": "mean"}})
    assert said.run.hex() == FROZEN_RUN
    assert manifest.from_bytes(said.to_bytes()) == said
    with pytest.raises(Malformed, match="not in canonical form"):
        manifest.from_bytes(wire.pack({**table(), "averaging": {"outer": "mean"}}))
    other = manifest.from_table({**table(), "averaging": {"outer": "nesterov"}})
    assert manifest.from_bytes(other.to_bytes()).averaging.outer == "nesterov"
    with pytest.raises(Malformed, match=r"^averaging.outer is median; it must be one of mean, noloco, nesterov$"):
        manifest.from_table({**table(), "averaging": {"outer": "median"}})


def test_ngrams_are_another_run_and_leaving_them_out_is_the_old_one() -> None:
    wanted = {"longest": 6, "rows": 4096, "row_width": 24}
    run = manifest.from_table({**table(), "grams": wanted})
    assert run.run.hex() != FROZEN_RUN
    assert manifest.from_bytes(run.to_bytes(), run.run) == run
    assert (
        len({manifest.from_table({**table(), "grams": {**wanted, key: value + 1}}).run for key, value in wanted.items()} | {run.run}) == 4
    )
    assert manifest.from_table(table()).grams.rows == 0
    with pytest.raises(Malformed, match=r"^missing key grams\.rows$"):
        manifest.from_table({**table(), "grams": {"longest": 6, "row_width": 24}})
    for key, value in (("rows", 0), ("rows", 2**26 + 1), ("longest", 1), ("longest", 9), ("row_width", 0)):
        with pytest.raises(Malformed, match=rf"^grams.{key} is {value}; it must be "):
            manifest.from_table({**table(), "grams": {**wanted, key: value}})


def test_the_order_of_keys_and_whole_numbers_for_fractions_do_not_matter() -> None:
    shuffled = {key: dict(reversed(value.items())) if isinstance(value, dict) else value for key, value in reversed(table().items())}
    shuffled["noise"]["sigma_high"] = 4
    shuffled["optimizer"]["clip"] = 1
    assert manifest.from_table(shuffled).run.hex() == FROZEN_RUN


def test_minus_zero_is_the_same_run_as_zero() -> None:
    assert manifest.from_table(changed(optimizer__weight_decay=-0.0)).run == manifest.from_table(changed(optimizer__weight_decay=0.0)).run


def test_every_field_has_a_part_in_the_digest() -> None:
    digests = {FROZEN_RUN}
    for name, value in OTHERS.items():
        other = table()
        put(other, name, value)
        digests.add(manifest.from_table(other).run.hex())
    tokens = changed(tokenizer="sha256:" + "ab" * 32, model__vocabulary=256)
    wider = changed(tokenizer="sha256:" + "ab" * 32, model__vocabulary=300)
    digests |= {manifest.from_table(each).run.hex() for each in (tokens, wider)}
    assert len(digests) == len(OTHERS) + 3
    leaves = {name for name in names() if name not in ("model", "noise", "schedule", "optimizer")}
    assert leaves | set(manifest.OPTIONAL) == set(OTHERS) | {"format", "tokenizer", "model.vocabulary"}, (
        "a new field needs another value here"
    )


@pytest.mark.parametrize("name", list(names()))
def test_a_missing_key_is_refused_by_name(name: str) -> None:
    broken = table()
    *section, key = name.split(".")
    del (broken[section[0]] if section else broken)[key]
    with pytest.raises(Malformed, match=f"^missing key {name}$"):
        manifest.from_table(broken)


@pytest.mark.parametrize("name", ["colour", "model.colour", "noise.colour", "schedule.colour", "optimizer.colour"])
def test_an_unknown_key_is_refused_by_name_with_the_known_ones(name: str) -> None:
    broken = table()
    put(broken, name, 1)
    with pytest.raises(Malformed, match=rf"^unknown key {name}; known are \w+, \w+"):
        manifest.from_table(broken)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"format": 2}, "format is 2; it must be 1 … 1"),
        ({"name": ""}, "name has 0 characters"),
        ({"name": "a\nb"}, "name holds control characters"),
        ({"blocks": 0}, "blocks is 0; it must be 1"),
        ({"blocks": limits.MAX_BLOCKS + 1}, "blocks is 1025"),
        ({"blocks": "3"}, "blocks must be a whole number, not str"),
        ({"blocks": True}, "blocks must be a whole number, not bool"),
        ({"objective": "magic"}, "objective is magic; it must be one of evidence, diffusionblocks"),
        ({"model": 3}, "model must be a table, not int"),
        ({"model__width": 130}, r"model\.width 130 must split into model\.heads 4"),
        ({"model__width": 12}, r"model\.width 12 must split into model\.heads 4 of even size"),
        ({"model__vocabulary": 300}, r"model\.vocabulary 256"),
        ({"tokenizer": "words"}, "tokenizer must be 'bytes' or 'sha256:'"),
        ({"tokenizer": "sha256:" + "zz" * 32}, "tokenizer must be"),
        ({"noise__sigma_low": 4.0}, r"noise\.sigma_high must be above noise\.sigma_low"),
        ({"noise__overlap": float("nan")}, r"noise\.overlap is nan"),
        ({"schedule__learning_rate": float("inf")}, r"schedule\.learning_rate is inf"),
        ({"schedule__learning_rate": 10**400}, r"schedule\.learning_rate is int; it must be 0 … 10"),
        ({"optimizer__accumulate": 3}, r"optimizer\.batch must be a multiple of optimizer\.accumulate"),
        ({"optimizer__beta2": 1.0}, r"optimizer\.beta1 and optimizer\.beta2 must be below 1"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name_and_what_is_allowed(changes: dict[str, object], why: str) -> None:
    with pytest.raises(Malformed, match=why):
        manifest.from_table(changed(**changes))


def test_bytes_of_another_run_are_refused() -> None:
    run = manifest.from_table(table())
    other = manifest.from_table(changed(seed=8))
    with pytest.raises(Malformed, match="does not have the run's digest"):
        manifest.from_bytes(other.to_bytes(), run.run)


def test_bytes_that_are_not_canonical_are_refused() -> None:
    whole = changed(optimizer__clip=1)
    with pytest.raises(Malformed, match="not in canonical form"):
        manifest.from_bytes(wire.pack(whole))


def test_more_bytes_than_a_manifest_may_have_are_refused() -> None:
    with pytest.raises(Malformed, match=f"at most {limits.MAX_MANIFEST_BYTES}"):
        manifest.from_bytes(bytes(limits.MAX_MANIFEST_BYTES + 1))


@given(st.data())
@settings(max_examples=200)
def test_a_flipped_bit_is_another_valid_manifest_or_malformed(data: st.DataObject) -> None:
    good = manifest.from_table(table())
    raw = bytearray(good.to_bytes())
    bit = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Malformed):
        manifest.from_bytes(bytes(raw), good.run)
    try:
        other = manifest.from_bytes(bytes(raw))
    except Malformed:
        return
    assert other != good
    assert other.to_bytes() == raw


@given(st.binary(max_size=200))
def test_any_bytes_are_a_manifest_or_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        manifest.from_bytes(data)
    with pytest.raises(Malformed):
        manifest.from_bytes(data, RunId(bytes(32)))


@given(st.integers(1, 64), st.floats(1e-3, 1.0), st.floats(1.1, 100.0))
def test_blocks_own_the_whole_range_of_noise_without_gaps_noisiest_first(blocks: int, low: float, high: float) -> None:
    run = manifest.from_table(changed(blocks=blocks, noise__sigma_low=low, noise__sigma_high=high))
    intervals = [run.sigma_interval(block) for block in range(blocks)]
    assert intervals[0][1] == pytest.approx(high)
    assert intervals[-1][0] == pytest.approx(low)
    for noisier, next_one in pairwise(intervals):
        assert noisier[0] == next_one[1]
        assert next_one[0] < next_one[1]


def test_the_default_boundaries_are_those_of_the_recipe() -> None:
    assert manifest.from_table(table()).sigma_edges() == pytest.approx((0.2, 0.543, 1.474, 4.0), abs=1e-3)


def test_the_learning_rate_rises_in_the_warm_up_falls_to_the_floor_and_stays() -> None:
    schedule = Schedule(steps_per_round=20, learning_rate=1.0, warmup_rounds=4, planned_rounds=104, floor=0.1)
    assert [schedule.rate(number) for number in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert schedule.rate(54) == pytest.approx(0.55)
    assert schedule.rate(104) == schedule.rate(10**6) == pytest.approx(0.1)
    rates = [schedule.rate(number / 2) for number in range(8, 208)]
    assert rates == sorted(rates, reverse=True)


def test_a_schedule_without_warm_up_or_shorter_than_its_warm_up_is_defined_everywhere() -> None:
    for warmup, planned in ((0, 1), (10, 5)):
        schedule = Schedule(steps_per_round=1, learning_rate=1.0, warmup_rounds=warmup, planned_rounds=planned, floor=0.0)
        assert all(0.0 <= schedule.rate(number) <= 1.0 for number in range(30))
