"""Data: what a node trains on, what it never trains on, and who trains on what."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktrain.node import cache, fetched, wiki
from blocktrain.node.corpus import Corpus, MappedPiece, Maps, Tokens
from blocktrain.node.data import TokenStream, load_tokens
from blocktrain.node.permutation import Permutation
from blocktrain.node.tokenizer import Bytes, describe_file, load_tokenizer
from blocktrain.protocol.errors import UsageError

CONTEXT = 32


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    """A text in which every place can be told from its neighbourhood: numbered lines of ten bytes, so that places are known."""
    path = tmp_path / "numbers.txt"
    path.write_text("".join(f"{n:09d}\n" for n in range(2000)))
    return path


def load(*sources: object, context: int = CONTEXT, folder: Path | None = None) -> Corpus:
    return load_tokens([str(source) for source in sources], Bytes(), context, folder=folder)


def stream(corpus: Corpus, peer: str = "anna", block: int = 0, seed: int = 7, batch: int = 4) -> TokenStream:
    return TokenStream(corpus, batch=batch, peer=peer, block=block, seed=seed)


def text_of(tokens: np.ndarray[Any, Any]) -> str:
    return bytes(tokens.astype(np.uint8)).decode()


def places(walk: TokenStream, windows: int, text: str) -> list[int]:
    """Where in the text the next windows begin."""
    rows = [row for _ in range(windows // 4) for row in walk.next_batch()]
    return [text.index(text_of(row)) for row in rows]


# ---- what is trained on ---------------------------------------------------------------------------------------------------------------


def test_a_batch_holds_windows_of_the_text_in_int64(numbers: Path) -> None:
    batch = stream(load(numbers)).next_batch()
    assert batch.dtype == np.int64
    assert batch.shape == (4, CONTEXT + 1)
    text = numbers.read_text()
    assert all(text_of(row) in text for row in batch)


def test_the_held_out_tail_begins_at_a_line_and_is_never_trained_on(numbers: Path) -> None:
    corpus = load(numbers)
    text = numbers.read_text()
    cut = len(corpus.train)
    assert cut + len(corpus.heldout) == len(text)
    assert text[cut - 1] == "\n"
    assert 0.05 * len(text) <= len(corpus.heldout) <= 0.08 * len(text)
    walk = stream(corpus)
    for _ in range(3):  # epochs, whose shifts differ
        assert max(places(walk, walk.windows // 4 * 4, text)) + CONTEXT + 1 <= cut
    assert all(text.index(text_of(row)) >= cut for row in stream(corpus).heldout(50))


def test_an_epoch_reads_every_window_once_and_all_but_the_ends_of_the_text(numbers: Path) -> None:
    corpus = load(numbers)
    walk = stream(corpus, batch=1)
    text = numbers.read_text()
    found = sorted(text.index(text_of(walk.next_batch()[0])) for _ in range(walk.windows))
    assert np.diff(found).tolist() == [CONTEXT] * (walk.windows - 1)
    assert len(corpus.train) - walk.windows * CONTEXT < 2 * CONTEXT + 1
    again = sorted(text.index(text_of(walk.next_batch()[0])) for _ in range(walk.windows))
    assert again != found  # another shift, so that other tokens are neighbours at a window's edge


def test_two_peers_of_a_block_read_different_shards_that_together_cover_it(numbers: Path) -> None:
    corpus = load(numbers)
    text = numbers.read_text()
    anna, bert = stream(corpus, "anna", batch=1), stream(corpus, "bert", batch=1)
    walks = [[text.index(text_of(walk.next_batch()[0])) for _ in range(walk.windows)] for walk in (anna, bert)]
    assert walks[0] != walks[1]
    assert sorted(walks[0]) == sorted(walks[1])
    # They walk the same circle: once each has reached the place where the other began, everything was read, and nothing twice.
    meet_anna, meet_bert = walks[0].index(walks[1][0]), walks[1].index(walks[0][0])
    assert meet_anna + meet_bert == anna.windows
    assert sorted(walks[0][:meet_anna] + walks[1][:meet_bert]) == sorted(walks[0])


@pytest.mark.parametrize("other", [{"peer": "bert"}, {"block": 1}, {"seed": 8}])
def test_the_order_depends_on_peer_block_and_seed_and_on_nothing_else(numbers: Path, other: dict[str, Any]) -> None:
    corpus = load(numbers)
    ours = stream(corpus).next_batch()
    assert np.array_equal(ours, stream(load(numbers)).next_batch())
    assert not np.array_equal(ours, stream(corpus, **other).next_batch())


@pytest.mark.parametrize("batches", [0, 1, 7, 1500])
def test_a_saved_position_is_where_training_goes_on(numbers: Path, batches: int) -> None:
    walk = stream(load(numbers))
    for _ in range(batches):
        walk.next_batch()
    saved = json.loads(json.dumps(walk.position()))
    expected = [walk.next_batch() for _ in range(5)]
    back = stream(load(numbers))
    assert back.seek(saved)
    assert all(np.array_equal(back.next_batch(), batch) for batch in expected)


@pytest.mark.parametrize(
    "position",
    [{}, {"next": 3}, {"format": 1, "data": "?", "windows": 1, "next": 3}, "next", "windows", "negative", "true"],
)
def test_a_position_of_other_data_is_not_taken(numbers: Path, position: object) -> None:
    walk = stream(load(numbers))
    walk.next_batch()
    good = walk.position()
    if isinstance(position, str):
        spoiled: dict[str, dict[str, object]] = {
            "next": {"next": "3"},
            "windows": {"windows": 5},
            "negative": {"next": -1},
            "true": {"next": True},
        }
        position = {**good, **spoiled[position]}
    assert isinstance(position, Mapping)
    assert not walk.seek(position)
    assert walk.position() == good


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.text(max_size=8))
def test_an_order_is_a_permutation(n: int, key: str) -> None:
    assert sorted(Permutation(n, key)(np.arange(n)).tolist()) == list(range(n))


def test_an_order_of_very_many_windows_takes_no_memory_and_is_no_pattern() -> None:
    n = 10**12 + 39
    places = Permutation(n, "key")(np.arange(4000))
    assert len(set(places.tolist())) == 4000
    assert places.max() < n
    assert 0.45 * n < places.mean() < 0.55 * n
    assert abs(float(np.corrcoef(places[:-1].astype(float), places[1:].astype(float))[0, 1])) < 0.1


def test_the_order_is_the_same_on_every_machine() -> None:
    assert Permutation(1000, "7/0/order/0")(np.arange(6)).tolist() == [656, 350, 557, 207, 614, 741]


# ---- where it comes from --------------------------------------------------------------------------------------------------------------


def test_builtin_needs_no_file_and_no_network(tmp_path: Path) -> None:
    corpus = load("builtin", folder=tmp_path / "cache")
    assert len(corpus.train) + len(corpus.heldout) > 300_000
    assert corpus.describe().startswith("builtin: 0.")
    assert "MB train" in corpus.describe()
    assert corpus.describe().endswith("kB held out")
    assert not (tmp_path / "cache").exists()


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    for name, letter in (("b.txt", "b"), ("a/z.txt", "a"), (".hidden/x", "x"), (".secret", "s"), ("empty", ""), ("c.bin", "\0")):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(letter * 500 if letter else "")
    corpus = load(tmp_path / "data")
    whole = bytes(corpus.train.read(0, len(corpus.train)).astype(np.uint8)) + bytes(
        corpus.heldout.read(0, len(corpus.heldout)).astype(np.uint8)
    )
    assert whole == b"a" * 500 + b"b" * 500 + b"\0" * 500


def test_windows_run_over_the_ends_of_files(tmp_path: Path) -> None:
    for n in range(100):
        (tmp_path / f"{n:03d}.txt").write_text(f"{n:09d}\n")
    corpus = load(tmp_path)
    text = "".join(f"{n:09d}\n" for n in range(100))
    assert all(text_of(row) in text for row in stream(corpus).next_batch())
    assert len(corpus.heldout) >= CONTEXT + 1
    assert len(corpus.train) % 10 == 0  # cut where a file begins


def test_a_glob_finds_files_at_any_depth(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "deep.txt").write_text("d" * 300)
    (tmp_path / "a" / "other.md").write_text("m" * 300)
    corpus = load(tmp_path / "**" / "*.txt")
    assert len(corpus.train) + len(corpus.heldout) == 300


def test_each_source_gives_its_own_held_out_tail(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a" * 10_000)
    (tmp_path / "b").write_text("b" * 5_000)
    heldout = load(tmp_path / "a", tmp_path / "b").heldout
    assert text_of(heldout.read(0, len(heldout))) == "a" * 500 + "b" * 250


def test_a_document_is_held_out_whole_where_there_is_one(tmp_path: Path) -> None:
    path = tmp_path / "documents"
    path.write_text("\n\n\n".join(f"title {n}\n\n" + "line\n" * 60 for n in range(200)).rstrip())
    corpus = load(path)
    assert text_of(corpus.heldout.read(0, 6)) == "title "


def test_more_files_than_may_be_open_are_read(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for n in range(300):
        (tmp_path / "data" / f"{n:03d}").write_text(f"{n:099d}\n")
    program = """
        import resource, sys
        from blocktrain.node.data import TokenStream, load_tokens
        from blocktrain.node.tokenizer import Bytes
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
        walk = TokenStream(load_tokens([sys.argv[1]], Bytes(), 32), batch=16, peer="a", block=0, seed=0)
        for _ in range(walk.windows // 16 + 1):
            walk.next_batch()
        print(walk.position()["next"] >= walk.windows)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "data")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "True", done.stderr


def test_a_large_file_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:  # 2 GB, without taking them from the disk
        file.write(b"begin\n" * 1000)
        file.truncate(2 * 10**9)
    program = """
        import resource, sys
        from blocktrain.node.data import TokenStream, load_tokens
        from blocktrain.node.tokenizer import Bytes
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        walk = TokenStream(load_tokens([sys.argv[1]], Bytes(), 1024), batch=64, peer="a", block=0, seed=0)
        for _ in range(10):
            walk.next_batch()
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert int(done.stdout) < 200  # MiB


def test_a_file_that_shrinks_ends_in_one_line_and_does_not_kill_the_process(numbers: Path) -> None:
    walk = stream(load(numbers))
    walk.next_batch()
    os.truncate(numbers, 4096)
    with pytest.raises(UsageError, match=r"numbers\.txt became shorter while it was being read"):
        walk.next_batch()


def fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


# ---- what is refused ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: p, "there is no such file or folder"),
        (lambda p: p.touch() or p, "the file is empty"),
        (lambda p: p.mkdir() or p, "no files at all"),
        (lambda p: (p.mkdir(), (p / "e").touch()) and p, "only empty files"),
        (lambda p: p / "*.txt", "no file matches"),
        (fifo, "not a regular file"),
        (lambda p: p.write_bytes(b"x" * (2 * CONTEXT + 1)) and p, "too short: 65 bytes, but one sequence of this run has 33 tokens"),
    ],
)
def test_data_that_cannot_be_used_is_named_with_its_remedy(tmp_path: Path, make: Any, expected: str) -> None:
    path = make(tmp_path / "given")
    with pytest.raises(UsageError, match=expected) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_data_that_this_user_may_not_read_is_named(numbers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # a test may run as root, who may read everything
    with pytest.raises(UsageError, match=r"numbers\.txt: it may not be read by this user"):
        load(numbers)


def test_exactly_two_sequences_are_enough(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"a\n" * (CONTEXT + 1))
    corpus = load(path)
    assert (len(corpus.train), len(corpus.heldout)) == (CONTEXT + 1, CONTEXT + 1)
    walk = stream(corpus)
    assert walk.next_batch().shape == (4, CONTEXT + 1)
    assert walk.heldout(3).shape == (3, CONTEXT + 1)


# ---- the excerpt in the gensim wheel --------------------------------------------------------------------------------------------------


def test_the_wikipedia_excerpt_is_cleaned_once_and_kept(tmp_path: Path) -> None:
    pytest.importorskip("gensim")
    corpus = load("gensim", folder=tmp_path)
    assert 2.3e6 < len(corpus.train) < 2.6e6
    assert text_of(corpus.heldout.read(0, 200)).splitlines()[1] == ""  # an article begins here: its title, an empty line
    kept = list(tmp_path.iterdir())
    assert [path.name.startswith("gensim-wiki-") for path in kept] == [True]
    before = kept[0].stat().st_mtime_ns
    load("gensim", folder=tmp_path)
    assert kept[0].stat().st_mtime_ns == before


def test_gensim_data_without_gensim_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install gensim"):
        load("gensim")


def test_markup_becomes_prose() -> None:
    markup = (
        "{{Infobox|a={{nested|b}}|c=[[link]]}}'''Albedo''' (<!-- no -->) is a [[ratio|measure]] of [[light]].<ref name=x>{{cite|y}}</ref>"
        "<ref name=x />\n\n== Terms ==\n[[File:A.jpg|thumb|An [[inner]] link]]It is&nbsp;high for [http://snow.org snow].\n* a list\n"
        "{| class=x\n|-\n| cell\n{|\n| inner\n|}\n|}\n== See also ==\n* [[Other]]\n== References ==\n{{reflist}}\n[[Category:Light]]"
    )
    assert wiki.clean(markup) == "Albedo is a measure of light.\n\nTerms\n\nIt is high for snow."


# ---- Hugging Face data sets -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A stand-in for the package `datasets`, and the list of what was asked of it."""
    calls: list[tuple[Any, ...]] = []

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> Iterator[dict[str, Any]]:
        calls.append((name, config, split, streaming))
        if name == "nowhere/none":
            raise FileNotFoundError("Dataset 'nowhere/none' doesn't exist on the Hub\nor cannot be accessed.")
        for n in range(50):
            yield (
                {"id": n, "story": f"story number {n} of {split}\n", "title": "t"}
                if config == "two"
                else {"id": n, "text": f"text {n:05d}"}
            )

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


def test_a_data_set_is_fetched_once_and_read_from_the_cache(tmp_path: Path, hub: list[tuple[Any, ...]]) -> None:
    corpus = load("hf:owner/name", folder=tmp_path)
    assert hub == [("owner/name", None, "train", True)]
    assert text_of(corpus.train.read(0, 26)) == "text 00000\n\n\ntext 00001\n\n\n"
    load("hf:owner/name", folder=tmp_path)
    assert len(hub) == 1
    load("hf:owner/name::test", folder=tmp_path)
    assert hub[1] == ("owner/name", None, "test", True)


def test_the_column_can_be_chosen_and_must_be_where_there_are_several(tmp_path: Path, hub: list[tuple[Any, ...]]) -> None:
    corpus = load("hf:owner/name:two:valid:story", folder=tmp_path)
    assert text_of(corpus.train.read(0, 48)) == "story number 0 of valid\nstory number 1 of valid\n"  # rows that are lines
    with pytest.raises(UsageError, match=r"which column\? Write hf:owner/name:two:train:COLUMN with one of story, title"):
        load("hf:owner/name:two", folder=tmp_path)
    with pytest.raises(UsageError, match="no text in column 'id'; the columns are id, text"):
        load("hf:owner/name:::id", folder=tmp_path)


def test_a_data_set_that_fails_is_one_line_and_leaves_nothing(tmp_path: Path, hub: list[tuple[Any, ...]]) -> None:
    with pytest.raises(UsageError, match="cannot be fetched: FileNotFoundError: Dataset 'nowhere/none'"):
        load("hf:nowhere/none", folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == []


def test_without_the_extra_the_command_to_install_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"pip install 'blocktrain\[datasets\]'"):
        load("hf:owner/name", folder=tmp_path)


@pytest.mark.parametrize("source", ["hf:", "hf:a:b:c:d:e"])
def test_a_malformed_data_set_is_explained(source: str) -> None:
    with pytest.raises(UsageError, match=r"write hf:NAME\[:CONFIG\[:SPLIT\[:COLUMN\]\]\]"):
        load(source)


def test_the_real_package_reads_a_local_data_set(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text("".join(json.dumps({"text": f"row {n:05d}", "n": n}) + "\n" for n in range(100)))
    corpus = load(f"hf:{tmp_path / 'set'}", folder=tmp_path / "cache")
    assert text_of(corpus.train.read(0, 24)) == "row 00000\n\n\nrow 00001\n\n\n"


def test_progress_is_told_and_a_disk_is_not_filled(tmp_path: Path, hub: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "REPORT_EVERY_S", 0.0)
    monkeypatch.setattr(cache.Progress.__init__, "__defaults__", (0.0,))
    said: list[str] = []
    load_tokens(["hf:owner/name"], Bytes(), CONTEXT, folder=tmp_path, report=said.append)
    assert said[0] == "fetching owner/name: 0.0 MB so far"
    monkeypatch.setattr(cache, "MIN_FREE_BYTES", 10**18)
    with pytest.raises(UsageError, match="is nearly full"):
        load_tokens(["hf:other/name"], Bytes(), CONTEXT, folder=tmp_path, report=said.append)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, hub: list[tuple[Any, ...]]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot prepare .*file.*: (Not a directory|File exists); XDG_CACHE_HOME"):
        load("hf:owner/name", folder=tmp_path / "file")


def test_a_data_set_stops_at_its_bound(tmp_path: Path, hub: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetched, "MAX_DATA_SET_BYTES", 100)
    corpus = load("hf:owner/name", folder=tmp_path, context=8)
    assert len(corpus.train) + len(corpus.heldout) <= 100


# ---- tokenizers -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    """A small byte-level BPE, trained here."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    inner.train_from_iterator(["the river runs to the sea, the sea to the sky\n"] * 50 + ["Größe, naïve, 河\n"] * 5, trainer)
    inner.enable_truncation(8)  # as a published file may have it
    path = tmp_path / "tokenizer.json"
    inner.save(str(path))
    return path


def test_text_is_encoded_once_into_tokens_that_decode_to_it(tmp_path: Path, tokenizer_file: Path) -> None:
    name, vocabulary = describe_file(tokenizer_file)
    tokenizer = load_tokenizer(name, 512, tokenizer_file)
    assert vocabulary == tokenizer.vocabulary <= 512
    text = "".join(f"the river number {n} runs to the sea: Größe, 河\n" for n in range(3000))
    (tmp_path / "text").write_text(text)
    corpus = load_tokens([str(tmp_path / "text")], tokenizer, CONTEXT, folder=tmp_path / "cache")
    parts = [corpus.train.read(0, len(corpus.train)), corpus.heldout.read(0, len(corpus.heldout))]
    assert "".join(tokenizer.decode(part.tolist()) for part in parts) == text
    assert tokenizer.decode(parts[1][:8].tolist()).startswith("the river ")
    assert len(parts[0]) < 0.7 * len(text)
    assert " tokens train" in corpus.describe()
    kept = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert [name.startswith("tokens-") and name.endswith(".u32") for name in kept] == [True, True]
    again = load_tokens([str(tmp_path / "text")], tokenizer, CONTEXT, folder=tmp_path / "cache")
    assert again.fingerprint == corpus.fingerprint
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == kept


def test_edited_text_of_the_same_length_is_encoded_again(tmp_path: Path, tokenizer_file: Path) -> None:
    tokenizer = load_tokenizer(describe_file(tokenizer_file)[0], 512, tokenizer_file)
    path = tmp_path / "text"
    path.write_text("the sea\n" * 20_000)
    load_tokens([str(path)], tokenizer, CONTEXT, folder=tmp_path / "cache")
    path.write_text("the sea\n" * 10_000 + "the sky\n" + "the sea\n" * 9_999)
    os.utime(path, ns=(1, 1))
    corpus = load_tokens([str(path)], tokenizer, CONTEXT, folder=tmp_path / "cache")
    assert "sky" in tokenizer.decode(corpus.train.read(0, len(corpus.train)).tolist())


def test_a_tokenizer_file_must_be_the_runs(tmp_path: Path, tokenizer_file: Path) -> None:
    name, vocabulary = describe_file(tokenizer_file)
    other = "sha256:" + "0" * 64
    with pytest.raises(UsageError, match=f"it has {name}, the run has {other}"):
        load_tokenizer(other, 512, tokenizer_file)
    with pytest.raises(UsageError, match="--tokenizer FILE"):
        load_tokenizer(name, 512)
    with pytest.raises(UsageError, match=f"has {vocabulary} tokens, but the run's model.vocabulary is 100"):
        load_tokenizer(name, 100, tokenizer_file)
    with pytest.raises(UsageError, match="this run's tokens are bytes"):
        load_tokenizer("bytes", 256, tokenizer_file)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UsageError, match=r"bad\.json is not a tokenizers file"):
        describe_file(tmp_path / "bad.json")
    with pytest.raises(UsageError, match="cannot read the tokenizer file"):
        describe_file(tmp_path / "none.json")


def test_bytes_decode_whatever_a_model_says() -> None:
    tokenizer = load_tokenizer("bytes", 256)
    assert tokenizer.decode(tokenizer.encode("Größe")) == "Größe"
    assert tokenizer.decode([72, 255, 300, -1, 105]) == "H\ufffdi"


def test_only_so_many_files_are_mapped_at_once(tmp_path: Path) -> None:
    maps = Maps(most=3)
    pieces = []
    for n in range(10):
        (tmp_path / str(n)).write_bytes(bytes([n]) * 10)
        pieces.append(MappedPiece(tmp_path / str(n), "u1", 0, 10, maps))
    row = Tokens(pieces)
    assert row.read(0, 100).tolist() == [n for n in range(10) for _ in range(10)]
    assert len(maps._maps) == 3
