"""From what a person types to the config that a node gets, and from every mistake to one line and an exit code."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import blocktrain.node
from blocktrain import __version__
from blocktrain.node import local
from blocktrain.node.commands import app
from blocktrain.node.config import AUTO, ClientConfig, EvalConfig, GenerateConfig, NodeConfig
from blocktrain.node.recipe_file import ready_text
from blocktrain.node.status import Status
from blocktrain.protocol import errors
from blocktrain.protocol.ids import peer_id_of_key

PEER = f"/ip4/203.0.113.7/tcp/31337/p2p/{peer_id_of_key(bytes(32))}"
OTHER = f"/ip4/203.0.113.8/tcp/31337/p2p/{peer_id_of_key(bytes(range(32)))}"

Calls = list[tuple[Any, ...]]


@pytest.fixture(autouse=True)
def a_bare_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without settings, and no settings in the environment."""
    for name in [name for name in os.environ if name.startswith("BLOCKTRAIN_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Stands in for what the commands call, and keeps what it was called with. Whatever is last in `outcomes` is what comes of it."""
    calls: Calls = []

    def module(name: str, **functions: Callable[..., Any]) -> None:
        monkeypatch.setattr(blocktrain.node, name, types.SimpleNamespace(**functions), raising=False)

    async def later(*given: Any) -> int:
        calls.append(given)
        return 0

    def at_once(*given: Any) -> int:
        calls.append(given)
        return 0

    module("launch", run_node=later)
    module("client", generate=later, evaluate=later)
    module("doctor", show=at_once)
    return calls


def node_config(work: Calls, *argv: str) -> NodeConfig:
    assert app.node_main(argv) == 0
    config = work[-1][0]
    assert isinstance(config, NodeConfig)
    return config


def refused(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 2) -> str:
    """Run a command line that must be refused: one line on stderr, nothing on stdout. Returns the line."""
    assert app.main(argv) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("blocktrain: error: ")
    return err


# From flags to the config


def test_a_joiner_needs_only_a_block_and_initial_peers(work: Calls) -> None:
    config = node_config(work, "--block", "2", "--initial-peers", PEER)
    assert config.training.block == 2
    assert config.network.initial_peers == (PEER,)
    defaults = NodeConfig()
    assert (config.gossip, config.files, config.network.ttl_s) == (defaults.gossip, defaults.files, defaults.network.ttl_s)


def test_initial_peers_stand_in_a_row_or_after_repeated_flags(work: Calls) -> None:
    assert node_config(work, "--initial-peers", PEER, OTHER).network.initial_peers == (PEER, OTHER)
    assert node_config(work, "--initial-peers", PEER, "--initial-peers", OTHER).network.initial_peers == (PEER, OTHER)


def test_block_auto_means_the_block_most_in_need(work: Calls) -> None:
    assert node_config(work, "--block", "auto", "--initial-peers", PEER).training.block == AUTO
    assert node_config(work, "--initial-peers", PEER).training.block is None  # ask


def test_every_setting_has_a_flag_that_reaches_its_field(work: Calls, tmp_path: Path) -> None:
    recipe = tmp_path / "run.toml"
    recipe.write_text(ready_text("tiny"))
    data = tmp_path / "text.txt"
    data.write_text("text")
    config = node_config(
        work,
        *("--new-run", str(recipe), "--name", "me", "--log-level", "debug", "--json"),
        *("--initial-peers", PEER, "--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--announce-maddrs", "/ip4/203.0.113.9/tcp/5"),
        *("--relay", PEER, "--wait", "--daemon-start-timeout-s", "9", "--ttl-s", "8", "--refresh-s", "2"),
        *(
            "--block",
            "1",
            "--data",
            str(data),
            "builtin",
            "--device",
            "cuda:1",
            "--threads",
            "3",
            "--rounds",
            "7",
            "--no-train",
            "--compile",
        ),
        *("--codec", "int8", "--topology", "ring", "--tau-s", "4", "--heldout-margin", "0.5"),
        *("--store", str(tmp_path / "store"), "--identity", str(tmp_path / "key"), "--checkpoint-every-s", "5", "--min-free-mib", "1"),
    )
    assert (config.new_run, config.name, config.log_level, config.json) == (recipe, "me", "debug", True)
    network = config.network
    assert network.initial_peers == (PEER,)
    assert network.host_maddrs == ("/ip4/127.0.0.1/tcp/0",)
    assert network.announce_maddrs == ("/ip4/203.0.113.9/tcp/5",)
    assert (network.relays, network.wait) == ((PEER,), True)
    assert (network.daemon_start_timeout_s, network.ttl_s, network.refresh_s) == (9, 8, 2)
    training = config.training
    assert (training.block, training.data, training.device) == (1, (str(data), "builtin"), "cuda:1")
    assert (training.threads, training.rounds, training.train, training.compile) == (3, 7, False, True)
    gossip = config.gossip
    assert (gossip.codec, gossip.topology, gossip.tau_s, gossip.heldout_margin) == ("int8", "ring", 4, 0.5)
    files = config.files
    assert (files.store, files.identity) == (tmp_path / "store", tmp_path / "key")
    assert (files.checkpoint_every_s, files.min_free_mib) == (5, 1)


def test_blocktrain_node_is_the_same_as_blocktrain_space_node(work: Calls) -> None:
    argv = ["--block", "2", "--initial-peers", PEER, "--rounds", "3"]
    assert app.node_main(argv) == app.main(["node", *argv]) == 0
    assert work[0][0] == work[1][0]


def test_public_is_a_flag(work: Calls) -> None:
    assert node_config(work, "--initial-peers", PEER, "--public").network.public


def test_generate_passes_the_request_on(work: Calls) -> None:
    argv = ["generate", "--initial-peers", PEER, "--prompt", "The river", "--mode", "one-sweep", "--seed", "5", "--json"]
    argv += ["--temperature", "0.5", "--top-k", "9", "--top-p", "0.9", "--draft", "16", "--bytes", "12"]
    assert app.main(argv) == 0
    client, request, prompt, _ = work[0]
    assert client == ClientConfig(initial_peers=(PEER,))
    assert request == GenerateConfig(
        prompt="The river", mode="one-sweep", seed=5, json=True, temperature=0.5, top_k=9, top_p=0.9, draft=16, max_tokens=12
    )
    assert prompt == b"The river"


def test_max_tokens_is_another_name_for_bytes(work: Calls) -> None:
    assert app.main(["generate", "--prompt", "a", "--max-tokens", "3"]) == 0
    assert work[0][1].max_tokens == 3


def test_a_prompt_may_be_piped_in(work: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff raw bytes too"), encoding="utf-8"))
    assert app.main(["generate"]) == 0
    assert work[0][2] == b"\xff raw bytes too"


def test_an_empty_prompt_is_a_prompt(work: Calls) -> None:
    assert app.main(["generate", "--prompt", ""]) == 0
    assert work[0][2] == b""


def test_eval_passes_its_settings_on(work: Calls) -> None:
    assert app.main(["eval", "--initial-peers", PEER, "--windows", "5"]) == 0
    assert work[0][:2] == (ClientConfig(initial_peers=(PEER,)), EvalConfig(windows=5))


# Status


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Status files as if two nodes of two runs lived on this machine; this process lends its number, and its parent."""
    monkeypatch.setenv("BLOCKTRAIN_RUNTIME_DIR", str(tmp_path / "runtime"))
    now = time.time()
    for pid, run, block in ((os.getpid(), "demo", 1), (os.getppid(), "other", 0)):
        status = Status(run=run.encode().hex(), run_name=run, name=f"node-{run}", block=block, blocks=3, pid=pid, written_at=now)
        (local.runtime_folder() / f"node-{pid}.json").write_text(status.to_json())


def test_status_shows_this_machines_nodes_as_a_table(two_nodes: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["status"]) == 0
    out, err = capsys.readouterr()
    heading, first, second = out.rstrip().splitlines()
    assert heading.split()[:3] == ["run", "block", "node"]
    assert first.split()[:3] == ["demo", "1/3", "node-demo"]
    assert second.split()[:3] == ["other", "0/3", "node-other"]
    assert err == ""


def test_status_json_is_one_object_per_node_with_the_promised_keys(two_nodes: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["status", "--json", "--run", "demo"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    status = json.loads(line)
    promised = {"run", "block", "round", "digest", "loss", "peers", "accepted", "late", "refused", "one_sided", "phase", "waiting_for"}
    assert promised <= set(status)
    assert (status["run_name"], status["block"]) == ("demo", 1)


def test_status_without_nodes_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BLOCKTRAIN_RUNTIME_DIR", str(tmp_path / "runtime"))
    assert "start one with blocktrain-node" in refused(capsys, "status", code=4)


def test_status_of_an_unknown_run_names_the_known_ones(two_nodes: None, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "status", "--run", "nothing", code=4)
    assert "demo" in line
    assert "other" in line


# From the environment and the file to the config


def test_flags_win_over_the_environment_the_file_and_the_defaults(work: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("blocktrain.toml").write_text(f'initial_peers = ["{PEER}"]\nblock = 1\nthreads = 2\nttl_s = 9\nrefresh_s = 2\n')
    monkeypatch.setenv("BLOCKTRAIN_BLOCK", "2")
    monkeypatch.setenv("BLOCKTRAIN_THREADS", "4")
    config = node_config(work, "--block", "3")
    assert config.training.block == 3  # the flag
    assert config.training.threads == 4  # the environment
    assert config.network.ttl_s == 9  # the file
    assert config.gossip.codec == "bf16"  # the default
    assert config.network.initial_peers == (PEER,)


def test_a_list_in_the_environment_is_split_at_spaces(work: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKTRAIN_INITIAL_PEERS", f"{PEER} {OTHER}")
    assert node_config(work).network.initial_peers == (PEER, OTHER)


def test_a_table_holds_for_its_command_and_the_top_level_for_all(work: Calls) -> None:
    lines = [
        f'initial-peers = ["{PEER}"]',
        'run = "everywhere"',
        "prompt = 'for generate'",
        "[node]",
        'run = "here"',
        "wait = true",
        'block = "auto"',
    ]
    Path("blocktrain.toml").write_text("\n".join([*lines, "[generate]", "seed = 4"]))
    config = node_config(work)
    assert (config.run, config.network.wait, config.training.block) == ("here", True, AUTO)
    assert app.main(["generate"]) == 0
    client, request, prompt, _ = work[-1]
    assert (client.run, client.initial_peers, request.seed, prompt) == ("everywhere", (PEER,), 4, b"for generate")


def test_another_file_is_named_with_config(work: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("blocktrain.toml").write_text("block = 1")
    (tmp_path / "other.toml").write_text("block = 2")
    assert node_config(work, "--config", "other.toml", "--initial-peers", PEER).training.block == 2
    monkeypatch.setenv("BLOCKTRAIN_CONFIG", "other.toml")
    assert node_config(work, "--initial-peers", PEER).training.block == 2


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("blok = 1", "unknown key 'blok'; did you mean 'block'?"),
        ("[nod]\nblock = 1", "no command for the table [nod]; did you mean 'node'?"),
        ("[node]\nprompt = 'x'", "[node]: unknown key 'prompt'"),
        ("config = 'other.toml'", "unknown key 'config'"),
        ("block = ", "not valid TOML"),
        ("threads = 'many'", '"many"'),
        ("threads = 0", "Must be >= 1"),
        ("codec = 'zip'", '"zip" is not one of fp32, bf16'),
    ],
)
def test_a_bad_settings_file_gets_one_line_that_names_it(
    text: str, hint: str, work: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.toml").write_text(text)
    line = refused(capsys, "node", "--initial-peers", PEER, "--config", "mine.toml")
    assert hint in line
    assert "mine.toml" in line or "codec" in line or "threads" in line
    assert not work


def test_a_settings_file_that_cannot_be_read_is_named(work: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "none.toml: No such file" in refused(capsys, "node", "--config", "none.toml")
    Path("raw.toml").write_bytes(b"name = '\xff'")
    assert "raw.toml is not UTF-8" in refused(capsys, "node", "--config", "raw.toml")


def test_an_unknown_name_in_the_environment_is_mentioned_but_harmless(
    work: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BLOCKTRAIN_BLOK", "3")
    node_config(work, "--initial-peers", PEER)
    assert "BLOCKTRAIN_BLOK is not a setting" in capsys.readouterr().err


# Mistakes


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["nod"], 'Did you mean "node"?'),
        (["node", "--blok", "1"], "Did you mean --block?"),
        (["export", "model.safetensors"], "'model.safetensors' stands alone: each value follows its option, as `blocktrain export"),
        (["node"], "--new-run FILE, or join one with --initial-peers"),
        (["node", "--initial-peers", "/ip4/203.0.113.7/tcp/1"], "has no peer id"),
        (["node", "--initial-peers", "203.0.113.7:31337"], "must begin with '/'"),
        (["node", "--initial-peers", PEER, "--block", "-1"], "neither a block number"),
        (["node", "--initial-peers", PEER, "--block", "two"], 'nor "auto"'),
        (["node", "--initial-peers", PEER, "--block", "1.5"], "neither a block number"),
        (["node", "--initial-peers", PEER, "--name", "x" * 500], "--name: at most 40 characters"),
        (["node", "--initial-peers", PEER, "--name", "two\nlines"], "no control characters"),
        (["node", "--initial-peers", PEER, "--threads", "0"], "--threads"),
        (["node", "--initial-peers", PEER, "--rounds", "many"], "--rounds"),
        (["node", "--initial-peers", PEER, "--device", "gpu"], "cpu, cuda, cuda:N or auto"),
        (["node", "--initial-peers", PEER, "--codec", "fp64"], "is not one of fp32"),
        (["node", "--initial-peers", PEER, "--topology", "star"], "is not one of pairs"),
        (["node", "--initial-peers", PEER, "--log-level", "loud"], "is not one of debug"),
        (["node", "--initial-peers", PEER, "--refresh-s", "30", "--ttl-s", "20"], "must be below --ttl-s 20"),
        (["node", "--initial-peers", PEER, "--ttl-s", "1000"], "for longer than 120 s"),
        (["node", "--initial-peers", PEER, "--tau-s", "0"], "--tau-s"),
        (["node", "--initial-peers", PEER, "--tau-s", "nan"], "--tau-s"),
        (["node", "--initial-peers", PEER, "--host-maddrs", "0.0.0.0:5"], "--host-maddrs"),
        (["node", "--initial-peers", PEER, "--announce-maddrs", "/ip4/203.0.113.7/tcp/0"], "port 0"),
        (["node", "--initial-peers", PEER, "--public", "--relay", PEER], "give one of them"),
        (["node", "--initial-peers", PEER, "--data", "missing.txt"], "no such file or folder"),
        (["node", "--initial-peers", PEER, "--data", "*.nothing"], "no file matches"),
        (["node", "--initial-peers", PEER, "--data", "hf:"], "write hf:NAME"),
        (["node", "--initial-peers", PEER, "--data", "empty.txt"], "the file is empty"),
        (["node", "--initial-peers", PEER, "--data", "empty"], "no files at all"),
        (["node", "--initial-peers", PEER, "--store", "empty.txt"], "is a file; give a folder"),
        (["node", "--initial-peers", PEER, "--identity", "empty"], "is a folder; give the file"),
        (["node", "--new-run", "missing.toml"], "missing.toml: there is no such file"),
        (["node", "--new-run", "empty.txt", "--run", "demo"], "the name stands in the file"),
        (["generate", "--prompt", "a", "--mode", "fast"], "is not one of speculative"),
        (["generate", "--prompt", "a", "--max-tokens", "0"], "--max-tokens"),
        (["generate", "--prompt", "a", "--max-tokens", "1000000000"], "--max-tokens"),
        (["generate", "--prompt", "a", "--temperature", "-1"], "--temperature"),
        (["generate", "--prompt", "a", "--top-p", "0"], "--top-p"),
        (["generate", "--prompt", "a", "--initial-peers", "nobody"], "--initial-peers 'nobody'"),
        (["eval", "--windows", "0"], "--windows"),
        (["eval", "--data", "missing.txt"], "no such file or folder"),
        (["status", "--initial-peers", "/ip4/1.2.3.4/tcp/1"], "has no peer id"),
    ],
)
def test_a_mistake_gets_one_line_and_exit_code_2_before_anything_starts(
    argv: list[str], hint: str, work: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty.txt").touch()
    Path("empty").mkdir()
    assert hint in refused(capsys, *argv)
    assert not work


def test_a_terminal_without_a_prompt_is_told_what_to_give(
    work: Calls, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    assert "--prompt TEXT, or pipe one in" in refused(capsys, "generate")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UsageError, 2),
        (errors.Unreachable, 3),
        (errors.NoPeers, 4),
        (errors.DoesNotFit, 5),
        (errors.RefusedBySwarm, 6),
    ],
)
def test_what_goes_wrong_later_keeps_its_exit_code(
    error: type[Exception], code: int, work: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fails(*given: Any) -> int:
        raise error("two\nlines of a reason")

    monkeypatch.setattr(blocktrain.node.launch, "run_node", fails)  # type: ignore[attr-defined]
    assert "two lines of a reason" in refused(capsys, "node", "--initial-peers", PEER, code=code)


def test_a_new_run_is_checked_before_anything_starts(work: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert node_config(work, "--new-run", "tiny", "--block", "2").new_run == Path("tiny")
    work.clear()
    assert "run tiny has 3 blocks, 0 to 2" in refused(capsys, "node", "--new-run", "tiny", "--block", "3")
    Path("run.toml").write_text("format = 1\nnam = 'x'\n")
    assert "did you mean name?" in refused(capsys, "node", "--new-run", "run.toml")
    assert not work


# Help


def test_version_is_printed_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


HEAVY = ["torch", "numpy", "hivemind", "scipy", "matplotlib", "multiaddr", "tokenizers", "safetensors", "cryptography", "uvloop"]


@pytest.mark.parametrize(
    "program", ["blocktrain.node.commands.app:main", "blocktrain.node.commands.app:node_main", "blocktrain.swarm_sim.app:main"]
)
def test_help_loads_nothing_heavy(program: str) -> None:
    module, function = program.split(":")
    script = f"""
import json, sys
from {module} import {function} as main
code = main(["--help"])
print(json.dumps([code, [name for name in {HEAVY} if name in sys.modules]]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [0, []]
    assert "Usage: blocktrain" in done.stdout


def test_every_command_explains_itself_without_boxes(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["--help"]) == 0
    listing = capsys.readouterr().out
    for command in ("node", "generate", "chat", "status", "eval", "export", "gateway", "doctor"):
        assert f"  {command} " in listing
        assert app.main([command, "--help"]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"Usage: blocktrain {command} [OPTIONS]\n")
        assert not set("│╭╰─") & set(text)
