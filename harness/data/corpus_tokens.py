"""The tokens of one corpus, from token files or the token cache, and the windows that are made of them. Called by
`utils.get_dataset`."""

import functools
import os
import pathlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.base import UserError, from_main_process
from harness.data.best_fit import BinnedDataset, pack_best_fit
from harness.data.chat import read_template
from harness.data.corpus import open_corpus, tokenize_once
from harness.data.corpus_files import local_files
from harness.data.documents import token_dtype
from harness.data.held_out import document_ends, part_of
from harness.data.records import Field
from harness.data.splits import cut_positions, files_of_split, parse_split
from harness.data.token_cache import read_beside
from harness.data.token_files import JoinedTokens, is_mapped, open_token_files
from harness.data.windows import PackedDataset, TokensOfDocuments, pack


@dataclass(frozen=True)
class CorpusReader:
    """How a corpus becomes tokens; the fields are the arguments of `utils.get_dataset`."""

    tokenizer: Any
    vocab_size: int
    cache_dir: str | os.PathLike | None
    skip_bad_records: bool
    check_whole: bool
    text_field: Field
    subset: str | None
    chat_template: str | None
    chat_loss: str
    progress: Callable[[Counter, int], None]

    @property
    def end_of_text(self) -> int | None:
        return None if self.tokenizer is None else self.tokenizer.eos_token_id

    def cache(self) -> pathlib.Path:
        if self.cache_dir is not None:
            return pathlib.Path(self.cache_dir)
        return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "train_fsdp"

    def find(self, dataset: str, split: str | None) -> "FoundTokens":
        """Finds the tokens of a split, and tokenizes them where nobody has."""
        files = local_files(dataset)
        if split is None:
            split = "train" if files else "train[:5%]"
        name, bounds = parse_split(split) if files else (split, [])  # the hub's slices are cut by `datasets`
        of_split = files_of_split(dataset, name, files) if files else []
        if is_mapped(of_split, self.text_field):
            mapped = open_token_files(of_split, self.text_field, self.vocab_size)
            return FoundTokens(split, of_split, None, {}, self.cut(bounds, mapped))
        corpus = open_corpus(dataset, name, files, self.tokenizer, self.vocab_size, self.text_field, self.subset)
        corpus = corpus.as_chat(read_template(self.chat_template), self.chat_loss)
        path, counts = tokenize_once(corpus, self.cache(), self.skip_bad_records, self.check_whole, self.progress)
        return FoundTokens(split, [], path, counts, self.cut(bounds, open_cache(path, self.vocab_size)[0]))

    def cut(self, bounds: list[str], tokens) -> tuple[int, int | None]:
        """The positions between which a slice of a split lies."""
        if not bounds:
            return 0, None
        first, last = cut_positions(bounds, tokens, self.end_of_text)
        return first, last


@dataclass(frozen=True)
class FoundTokens:
    """Where the tokens of a split lie: what one process finds for all of its node."""

    split: str
    files: list[pathlib.Path]  # token files, which are mapped
    path: pathlib.Path | None  # of the token cache, where there are none
    counts: dict  # what was counted when they were tokenized
    positions: tuple[int, int | None]


def load_windows(
    reader: CorpusReader,
    dataset: str,
    split: str | None,
    seq_len: int,
    packing: str | None,
    document_mask: bool | None,
    seed: int,
    is_main: bool,
) -> PackedDataset | BinnedDataset:
    """The windows of one corpus; the arguments are those of `utils.get_dataset`. `is_main` is true for one process of
    each node, which tokenizes for the others."""
    found = from_main_process(functools.partial(reader.find, dataset, split), is_main)
    mapped: JoinedTokens | None = None
    tokens: Any
    trained = None
    if found.files:
        tokens = mapped = open_token_files(found.files, reader.text_field, reader.vocab_size)
    else:
        tokens, trained = open_cache(found.path, reader.vocab_size)
    is_chat = trained is not None
    is_best_fit = packing == "best-fit" or (packing is None and is_chat)
    if is_best_fit and getattr(tokens, "document_ends", None) is None:
        # found by one process of a node: all tokens are read for it
        ends = from_main_process(functools.partial(ends_by_token, dataset, tokens, reader), is_main)
        tokens = TokensOfDocuments(tokens, ends)
    tokens = part_of(tokens, *found.positions)
    if is_chat:
        trained = part_of(trained, *found.positions)
    packed: Any
    if is_best_fit:
        options = {"padding": padding_of(reader.tokenizer), "seed": seed, "text_end": reader.end_of_text}
        packed = pack_best_fit(tokens, seq_len, dataset, found.split, trained=trained, **options)
    else:
        packed = pack(tokens, seq_len, dataset, found.split, trained)
        packed.text_end = reader.end_of_text
    packed.document_mask = is_chat if document_mask is None else document_mask
    packed.mapped, packed.counts, packed.path, packed.is_chat = mapped, found.counts, found.path, is_chat
    return packed


def ends_by_token(dataset: str, tokens, reader: CorpusReader) -> np.ndarray:
    """Where the documents of a corpus end, by the end-of-text token; a UserError where there is none."""
    if reader.end_of_text is None:
        name = getattr(reader.tokenizer, "name_or_path", "the tokenizer")
        raise UserError(
            f"--packing best-fit: {name} has no end-of-text token (eos_token), and --dataset {dataset} does not say "
            "where its documents end"
        )
    return document_ends(tokens, reader.end_of_text)


def open_cache(path: pathlib.Path, vocab_size: int) -> tuple[Any, np.ndarray | None]:
    """(the tokens of a token cache, the mask of conversations, None of other documents)."""
    tokens = np.memmap(path, token_dtype(vocab_size), mode="r")
    beside = read_beside(path)
    if beside is None:
        return tokens, None
    mask, ends = beside
    return TokensOfDocuments(tokens, ends), mask


def padding_of(tokenizer) -> int:
    """The token that fills windows up: the tokenizer's padding, or its end of text, or 0."""
    for name in ("pad_token_id", "eos_token_id"):
        token = getattr(tokenizer, name, None)
        if token is not None:
            return token
    return 0
