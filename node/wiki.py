"""Plain text from the Wikipedia excerpt that comes inside the gensim wheel: real text for benches, without a download.

The excerpt is MediaWiki's XML. The cleaner is simple on purpose and part of what a bench's numbers mean, hence versioned:
  1. articles only (namespace 0), no redirects;
  2. out go comments, references, formulas, galleries and other tagged blocks, tables, templates, links to files and categories;
  3. list items go, too (mostly sources and works); a link keeps its words, a heading its title unless nothing is below it; bold and
     italics lose their quotes, other tags their brackets;
  4. entities are resolved, runs of spaces become one, empty lines separate paragraphs, and two of them separate articles.
"""

from __future__ import annotations

import bz2
import html
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final
from xml.etree import ElementTree

from blocktrain.protocol.errors import UsageError

VERSION: Final = 1
BETWEEN_ARTICLES: Final = "\n\n\n"
_EXCERPT: Final = Path("test", "test_data", "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2")
_MAX_NESTING: Final = 12  # templates and tables inside one another

_COMMENT: Final = re.compile(r"<!--.*?-->", re.DOTALL)
_BLOCK: Final = re.compile(
    r"<(ref|math|gallery|timeline|source|syntaxhighlight|code|pre|score|imagemap|hiero|div|table)\b[^<>]*(?<!/)>.*?</\1\s*>",
    re.DOTALL | re.IGNORECASE,
)
_TAG: Final = re.compile(r"</?[a-zA-Z][^<>]*>")
_TEMPLATE: Final = re.compile(r"\{\{[^{}]*\}\}")
_TABLE: Final = re.compile(r"\{\|(?:(?!\{\|).)*?\n\s*\|\}", re.DOTALL)
_MEDIA: Final = re.compile(
    r"\[\[\s*(?:file|image|category|[a-z]{2,3}(?:-[a-z]+)?)\s*:(?:[^\[\]]|\[\[[^\[\]]*\]\]|\[[^\[\]]*\])*\]\]", re.IGNORECASE
)
_LINK: Final = re.compile(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]")
_OUTSIDE: Final = re.compile(r"\[(?:https?|ftp)://[^\s\]]*\s*([^\]]*)\]")
_QUOTES: Final = re.compile(r"'{2,}")
_HEADING: Final = re.compile(r"^[ \t]*=+[ \t]*([^\n]*?)[ \t]*=+[ \t]*$", re.MULTILINE)
_EMPTY_SECTION: Final = re.compile(r"\x01[^\n]*\s*(?=\x01|\Z)")
_LIST: Final = re.compile(r"^[*#:;].*$", re.MULTILINE)
_MAGIC: Final = re.compile(r"__[A-Z]+__")
_SPACES: Final = re.compile(r"[ \t\u00a0]+")
_EMPTY_BRACKETS: Final = re.compile(r"\s*\(\s*[;,]*\s*\)")
_LINES: Final = re.compile(r"\s*\n\s*\n\s*")
_LEFT_OVER: Final = re.compile(r"^\s*[|!{}].*$", re.MULTILINE)


def excerpt_file() -> Path:
    """Where the excerpt lies. gensim itself is not imported. Raises: UsageError: it is not installed."""
    spec = importlib.util.find_spec("gensim")
    for place in (spec.submodule_search_locations if spec is not None else None) or ():
        path = Path(place) / _EXCERPT
        if path.is_file():
            return path
    raise UsageError("the data 'gensim' is the Wikipedia excerpt inside the gensim wheel: pip install gensim, or use builtin")


def articles(path: Path) -> Iterator[str]:
    """Cleaned articles, each with its title as the first line, in the order of the file. Raises: OSError, ElementTree.ParseError."""
    with bz2.open(path) as file:
        yield from _articles(file)


def _articles(file: IO[bytes]) -> Iterator[str]:
    for _, page in ElementTree.iterparse(file):
        if not page.tag.endswith("}page") and page.tag != "page":
            continue
        if page.findtext("{*}ns") == "0" and page.find("{*}redirect") is None:
            text = clean(page.findtext("{*}revision/{*}text") or "")
            if text:
                yield f"{page.findtext('{*}title')}\n\n{text}"
        page.clear()


def clean(markup: str) -> str:
    """An article's markup as plain text."""
    text = _COMMENT.sub("", markup)
    text = re.sub(r"<ref\b[^<>]*/>", "", text, flags=re.IGNORECASE)
    text = _BLOCK.sub("", text)
    for pattern in (_TEMPLATE, _TABLE, _TEMPLATE):
        for _ in range(_MAX_NESTING):
            text, count = pattern.subn("", text)
            if not count:
                break
    text = _MEDIA.sub("", text)
    for pattern in (_LINK, _LINK, _OUTSIDE):
        text = pattern.sub(r"\1", text)
    text = _QUOTES.sub("", _MAGIC.sub("", _TAG.sub("", text)))
    text = html.unescape(_LIST.sub("", _HEADING.sub("\n\n\x01\\1\n\n", text)))
    text = _EMPTY_BRACKETS.sub("", _SPACES.sub(" ", _LEFT_OVER.sub("", text)))
    text = _EMPTY_SECTION.sub("", text).replace("\x01", "")
    return _LINES.sub("\n\n", text).strip()
