"""The commands that ask a model, on a file: what a pipe gets, what a terminal gets, what is said beside it, and the loop of prompts."""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path

import pytest

from blocktrain.node import asking
from blocktrain.node.compute import flat, takehome
from blocktrain.node.config import ChatConfig, ClientConfig, GenerateConfig
from blocktrain.node.ports import Published
from blocktrain.node.runtime import Runtime
from blocktrain.protocol.errors import UsageError
from tests.sweeping import MANIFEST, state_of

BROKEN = b"caf\xe9 \xf0\x9f \xff"  # Latin-1, half a character, and a byte that is none


class Pipe(io.TextIOWrapper):
    """A stdout that is no terminal, or says that it is one."""

    def __init__(self, terminal: bool = False) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8")
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    def got(self) -> bytes:
        self.flush()
        raw = self.buffer
        assert isinstance(raw, io.BytesIO)
        return raw.getvalue()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("home") / "tiny.safetensors"
    states = {block: state_of(block) for block in range(MANIFEST.blocks)}
    takehome.save(path, MANIFEST, {block: (Published(4, flat.digest(state)), state) for block, state in states.items()})
    return path


async def generated(wish: GenerateConfig, prompt: bytes) -> int:
    return await asking.generate(ClientConfig(), wish, prompt, Runtime())


async def test_a_pipe_gets_the_very_bytes_and_a_terminal_gets_characters(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = {}
    wish = GenerateConfig(model=file, seed=7, max_tokens=30)
    for terminal in (False, True):
        out = Pipe(terminal)
        monkeypatch.setattr(sys, "stdout", out)
        assert await generated(wish, BROKEN) == 0
        shown[terminal] = out.got()
    assert len(shown[False]) == len(BROKEN) + 30
    assert shown[False].startswith(BROKEN)
    assert shown[True] == shown[False].decode("utf-8", "replace").encode() + b"\n"
    assert "block 0 at home (round 4), block 1 at home (round 4)" in capsys.readouterr().err


async def test_json_keeps_the_bytes_that_are_no_text(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert await generated(GenerateConfig(model=file, seed=7, max_tokens=30, json=True), BROKEN) == 0
    said = json.loads(capsys.readouterr().out)
    data = base64.b64decode(said["text_base64"])
    assert len(data) == said["tokens"] == said["bytes"] == 30
    assert said["text"] == data.decode("utf-8", "replace")
    assert said["missing"] == []
    assert said["rounds"] == [4, 4, 4]


async def test_a_prompt_longer_than_the_context_says_how_it_is_cut(file: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert await generated(GenerateConfig(model=file, seed=7, max_tokens=5), b"x" * 100) == 0
    assert "longer than the context: its first 80 of 100 tokens were not seen" in capsysbinary.readouterr().err.decode()


async def test_every_mode_is_named_and_the_rough_one_is_called_so(file: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    for mode in ("speculative", "autoregressive", "one-sweep"):
        assert await generated(GenerateConfig(model=file, seed=7, max_tokens=5, mode=mode), b"") == 0
        said = capsysbinary.readouterr().err.decode()
        assert said.startswith(f"{mode} over a chain: 5 tokens in ")
        assert ("rough by nature" in said) == (mode == "one-sweep")


async def test_a_file_and_a_swarm_at_once_are_refused(file: Path) -> None:
    with pytest.raises(UsageError, match="leave out --initial-peers"):
        await asking.generate(ClientConfig(initial_peers=("/ip4/1.2.3.4/tcp/1",)), GenerateConfig(model=file), b"a", Runtime())


async def test_a_loop_of_prompts_goes_on_from_what_was_said(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The empty line goes on from the text, /new forgets it, /quit ends it, and so does the end of input."""
    answers = {}
    for name, lines in {"go on": b"The river\n\n/quit\nnever read\n", "forget": b"The river\n/new\nThe river\n"}.items():
        out = Pipe()
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
        assert await asking.chat(ClientConfig(), ChatConfig(model=file, seed=7, max_tokens=20, temperature=0, about=True), Runtime()) == 0
        answers[name] = out.got()
    assert [len(answer) for answer in answers.values()] == [40, 40]
    assert answers["forget"][:20] == answers["forget"][20:] == answers["go on"][:20], "the likeliest text after the same words"
    assert answers["go on"][20:] != answers["go on"][:20]
    assert capsys.readouterr().err.count("block 2 at home") == 4
