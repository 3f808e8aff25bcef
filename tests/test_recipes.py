"""Recipes: the ready ones are runs, and every mistake in a run.toml is one line with file, key and remedy."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest
import tokenizers

from blocktrain.node import recipe_file
from blocktrain.node.recipe_file import load_recipe, parse_recipe, ready_recipes, ready_text
from blocktrain.node.tokenizer import describe_file
from blocktrain.protocol import manifest
from blocktrain.protocol.errors import UsageError

TINY = ready_text("tiny")


@pytest.mark.parametrize("name", ready_recipes())
def test_a_ready_recipe_is_a_run_with_a_word_on_every_size(name: str) -> None:
    run = load_recipe(name)
    assert run.name == name
    assert manifest.from_bytes(run.to_bytes(), run.run) == run
    assert ready_text(name).startswith(f"# {name}: ")


def test_three_recipes_come_with_blocktrain() -> None:
    assert ready_recipes() == ["gpu", "small", "tiny"]


def test_every_line_of_the_smallest_recipe_is_explained_or_plain() -> None:
    plain = {
        "format",
        "name",
        "width",
        "layers",
        "heads",
        "vocabulary",
        "sigma_high",
        "warmup_rounds",
        "floor",
        "learning_rate",
        "beta1",
        "beta2",
    }
    for line in TINY.splitlines():
        key = re.match(r"(\w+) = ", line)
        assert key is None or "#" in line or key[1] in plain, line


def test_the_smallest_recipe_is_that_of_the_laptop() -> None:
    run = load_recipe("tiny")
    assert (run.blocks, run.objective, run.tokenizer) == (3, "evidence", "bytes")
    assert (run.model.width, run.model.heads, run.model.layers, run.model.context, run.model.vocabulary) == (128, 4, 2, 128, 256)
    assert (run.noise.sigma_low, run.noise.sigma_high, run.noise.overlap, run.noise.window_share) == (0.2, 4.0, 0.1, 0.125)
    schedule = run.schedule
    assert (schedule.steps_per_round, schedule.warmup_rounds, schedule.planned_rounds) == (20, 3, 60)
    assert (schedule.learning_rate, schedule.floor) == (4e-3, 0.1)
    assert (run.grams.longest, run.grams.rows, run.grams.row_width) == (6, 2**14, 24)
    optimizer = run.optimizer
    assert (optimizer.batch, optimizer.clip, optimizer.beta1, optimizer.beta2) == (8, 1.0, 0.9, 0.95)
    assert (optimizer.weight_decay, optimizer.warmup_steps, optimizer.accumulate) == (0.05, 20, 1)


def test_a_copied_recipe_is_the_same_run(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(TINY)
    assert load_recipe(path).run == load_recipe("tiny").run


def test_a_file_goes_before_a_recipe_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").write_text(TINY.replace("blocks = 3", "blocks = 5"))
    assert load_recipe("tiny").blocks == 5


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("width = 128", "widht = 128", r"run.toml: unknown key model\.widht; known are width, layers, .*; did you mean width\?"),
        ("[noise]", "[nois]", "unknown key nois; known are format, .*; did you mean noise?"),
        ("seed = 0", "seed = 0\nfavourite = 1", r"unknown key favourite; .*; remove it, or see the recipe `tiny`"),
        ("floor = 0.1", "", r"missing key schedule\.floor; add in \[schedule\] for example: floor = 0\.1"),
        ('objective = "evidence"', "", 'missing key objective; add at the top for example: objective = "evidence"'),
        ("blocks = 3", "blocks = 0", "blocks is 0; it must be 1 … 1024"),
        ("blocks = 3", "blocks = 3.0", "blocks must be a whole number, not float"),
        ('"evidence"', '"magic"', "objective is .?magic.?; it must be one of evidence"),
        ("heads = 4", "heads = 5", r"model\.width 128 must split into model\.heads 5 of even size"),
        ("sigma_high = 4.0", "sigma_high = 0.1", r"noise\.sigma_high must be above noise\.sigma_low"),
        ("sigma_high = 4.0", "sigma_high = inf", r"noise\.sigma_high is inf"),
        ("vocabulary = 256", "vocabulary = 300", r"the tokenizer 'bytes' has model\.vocabulary 256"),
        ('tokenizer = "bytes"', 'tokenizer = "words"', "tokenizer must be 'bytes' or 'sha256:'"),
        ('tokenizer = "bytes"', 'tokenizer = "none.json"', "cannot read the tokenizer file .*none.json: No such file"),
        ("[model]", "[model", "run.toml is not valid TOML: .*line"),
        ('name = "tiny"', 'name = ""', "name has 0 characters"),
        ("[schedule]", "[[schedule]]", "schedule must be a table"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_its_remedy(before: str, after: str, expected: str) -> None:
    assert before in TINY
    with pytest.raises(UsageError, match=expected) as caught:
        parse_recipe(TINY.replace(before, after, 1), "run.toml")
    assert str(caught.value).startswith(("run.toml", "cannot read"))
    assert "\n" not in str(caught.value)


def test_every_key_is_required() -> None:
    lines = TINY.splitlines()
    for number, line in enumerate(lines):
        if re.match(r"\w+ = ", line):
            with pytest.raises(UsageError, match=rf"missing key [a-z.]*{line.split(' ')[0]}; add "):
                parse_recipe("\n".join(lines[:number] + lines[number + 1 :]), "run.toml")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: None, "there is no such file, and no recipe of that name: give a run.toml or one of gpu, small, tiny"),
        (lambda p: p.mkdir(), "cannot read .*given: Is a directory"),
        (lambda p: p.write_bytes(b"\xff\xfe"), "is not a run.toml: byte 0 is not UTF-8 text"),
        (lambda p: p.write_bytes(b"#" * 100_000), "too large for a run.toml"),
        (lambda p: p.write_bytes(b""), "missing key format"),
    ],
)
def test_a_file_that_is_no_recipe_is_named(tmp_path: Path, make: object, expected: str) -> None:
    path = tmp_path / "given"
    make(path)  # type: ignore[operator]
    with pytest.raises(UsageError, match=expected) as caught:
        load_recipe(path)
    assert str(path) in str(caught.value)


def test_the_names_are_no_way_out_of_the_folder() -> None:
    for name in ("../recipes/tiny", "tiny.toml", "", "TINY"):
        with pytest.raises(UsageError, match="no recipe"):
            ready_text(name)


def test_a_tokenizers_file_is_named_by_its_digest(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: n for n, word in enumerate(["a", "b", "c"])}, unk_token="a"))
    inner.save(str(tmp_path / "words.json"))
    text = TINY.replace('"bytes"', '"words.json"', 1)
    path = tmp_path / "run.toml"
    path.write_text(text)
    run = load_recipe(path)
    assert run.tokenizer == describe_file(tmp_path / "words.json")[0]
    assert run.tokenizer.startswith("sha256:")
    path.write_text(text.replace("vocabulary = 256", "vocabulary = 2"))
    with pytest.raises(UsageError, match=r"model\.vocabulary is 2, but the tokenizer words\.json has 3 tokens"):
        load_recipe(path)


def test_recipes_are_found_in_an_installed_wheel_as_in_a_checkout() -> None:
    from importlib import resources

    folder = resources.files("blocktrain.node") / "recipes"
    assert sorted(item.name for item in folder.iterdir()) == [f"{name}.toml" for name in ready_recipes()]
    assert all(tomllib.loads(ready_text(name)) for name in ready_recipes())
    assert os.fspath(recipe_file.__file__).endswith("recipe_file.py")
