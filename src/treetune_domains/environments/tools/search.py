"""A search over files of text, by BM25."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Gt, MinLen

from treetune.tasks.sources import json_lines
from treetune_domains.environments.tools.base import Tool
from treetune_domains.extras import missing_extras


@Tool.register("search")
@dataclass(frozen=True, kw_only=True)
class Search(Tool):
    """The passages that fit the words it is called with best: BM25 (Robertson and Zaragoza 2009), by the
    library bm25s. The index is made when a worker process starts."""

    corpus: Annotated[tuple[str, ...], MinLen(1)]
    """Files of JSON lines, each with a passage, and perhaps a `title`."""
    name: str = "search"
    results: Annotated[int, Gt(0)] = 3
    """Passages of a result."""
    characters: Annotated[int, Gt(0)] = 500
    """Of each passage."""
    text: str = "text"
    """The key of a passage in its row."""

    def missing(self) -> Sequence[str]:
        absent = missing_extras("the tool search", "bm25s")
        files = [name for name in self.corpus if not Path(name).is_file()]
        return [*absent, *(f"{name} isn't there, which is searched" for name in files)]

    def prepare(self) -> None:
        _index(self.corpus, self.text)

    def call(self, argument: str) -> str:
        import bm25s

        index, passages = _index(self.corpus, self.text)
        words = bm25s.tokenize([argument], stopwords=None, show_progress=False, return_ids=False)
        if not words[0]:
            return "Nothing was asked for."
        count = min(self.results, len(passages))
        found, scores = index.retrieve(words, k=count, show_progress=False)
        fitting = [passages[place] for place, score in zip(found[0], scores[0], strict=True) if score > 0]
        if not fitting:
            return "Nothing was found."
        return "\n".join(f"({number}) {one[: self.characters]}" for number, one in enumerate(fitting, 1))


@lru_cache(maxsize=4)
def _index(files: tuple[str, ...], key: str) -> tuple[Any, Sequence[str]]:
    """Raises ValueError for a row without a passage, and for no row at all."""
    import bm25s

    passages = []
    for name in files:
        for place, row in json_lines(Path(name)):
            text = row.get(key)
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"{place}: it has no text under {key!r}")
            title = row.get("title")
            passages.append(f"{title}: {text}" if title else text)
    if not passages:
        raise ValueError(f"there is nothing to search in {', '.join(files)}")
    index = bm25s.BM25()
    index.index(bm25s.tokenize(passages, stopwords=None, show_progress=False), show_progress=False)
    return index, passages
