"""The reader of corpora: their tokens, from the token cache or from token files, as packed sequences."""

import dataclasses
import functools
import hashlib
import itertools
import os
import pathlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness import base, job
from harness.data import formats, tokenize
from harness.data.cache import make_once
from harness.data.chat import ChatEncoder, no_mask_error
from harness.data.corpora import Corpus, are_token_files, cut_positions, parse_split, slice_rows
from harness.data.files import DataFile
from harness.data.formats import read_records
from harness.data.packing import PackedDataset, WholeDocumentDataset, pack_once
from harness.data.schema import read_documents
from harness.data.tokenize import RowEncoder, TextEncoder, next_batch
from harness.data.tokens import Tokens, describe_files, differing_tokenizer, map_numbers

TOKENIZE_BATCH = 2000  # documents per call of the tokenizer, which spreads them over all cores


@dataclass(frozen=True, kw_only=True)
class CorpusReader:
    """Read corpora as tokens and pack these; most fields are arguments of `utils.get_dataset`."""

    tokenizer: Any
    seq_len: int
    vocab_size: int
    cache_dir: str | os.PathLike | None = None
    skip_bad_records: bool = False
    packing: str | None = None
    chat_template: str | None = None
    chat_loss: str = "assistant"
    document_mask: bool | None = None  # None: the default of the corpora, which `open_sequences` resolves
    seed: int = 0
    is_main: bool = True  # True for the process of each node that tokenizes for the others

    @property
    def end_of_text(self) -> int | None:
        return None if self.tokenizer is None else self.tokenizer.eos_token_id

    def encoder(self, corpus: Corpus) -> TextEncoder:
        if corpus.kind == "labels":
            return RowEncoder(self.tokenizer, self.vocab_size)
        if not corpus.is_chat:
            return TextEncoder(self.tokenizer, self.vocab_size)
        if self.tokenizer is None:
            raise base.UserError(f"--dataset {corpus.source.dataset}: holds conversations, and there is no tokenizer")
        chat = self.chat_encoder(corpus)
        chat.check(corpus.source.dataset)
        return chat

    def chat_encoder(self, corpus: Corpus) -> ChatEncoder:
        template = base.read_template(self.chat_template)
        return ChatEncoder(
            self.tokenizer, self.vocab_size, template, self.chat_loss, self.skip_bad_records, corpus.layout
        )

    def open_tokens(self, corpus: Corpus, split: str) -> tuple[Tokens, str]:
        """(the tokens of a split, mapped; where they come from, in words). Text is tokenized unless the cache has it. A
        slice is cut at document boundaries."""
        name, bounds = parse_split(split)
        split_files = corpus.listing.files_in_split(name)
        # `corpus.from_token_files` is of the training split only: another split may have text
        if are_token_files(split_files):
            opened = base.call_on_all_ranks(  # raises on all ranks if a file is missing on one node
                lambda: [formats.open_token_file(file, self.vocab_size) for file in split_files]
            )
            line = describe_files(opened)
            if warning := differing_tokenizer(opened, self.tokenizer):
                job.warn(warning)
        else:
            rows = None
            if corpus.listing.is_hub and bounds:
                rows = base.broadcast_from_rank_0(functools.partial(slice_rows, split_files, bounds))
            if rows:
                bounds = []  # only these rows are tokenized: nothing is left to cut
            folder, record = base.broadcast_from_node_main(
                functools.partial(self._tokenize, corpus, split_files, rows), self.is_main
            )
            opened, line = [tokenize.open_cache(folder, self.vocab_size)], tokenize.describe_cache(folder, record)
            for warning in record["warnings"]:
                job.warn(warning)
        tokens = Tokens(opened, self.vocab_size, self.end_of_text)
        if bounds:
            tokens = self.with_doc_ends(tokens)
            tokens = tokens.between(*cut_positions(bounds, tokens.doc_ends, len(tokens)))
        return tokens, line

    def _tokenize(
        self, corpus: Corpus, split_files: list[DataFile], rows: tuple[int, int] | None
    ) -> tuple[pathlib.Path, dict]:
        """Tokenize files, or some of their rows, unless the cache has them; return (the cache's folder, its record)."""
        encoder = self.encoder(corpus)
        content = [file.identity() for file in split_files]
        identity = [tokenize.VERSION, content, rows, corpus.names_to_read, corpus.has_loss_mask, self.skip_bad_records]
        identity += encoder.identity()

        def make(folder: pathlib.Path) -> dict:
            counts: Counter = Counter()  # of documents and tokens, and of what is left out
            records = itertools.chain.from_iterable(read_records(file, corpus.names_to_read) for file in split_files)
            if rows:
                records = itertools.islice(records, *rows)  # type: ignore[assignment]
            documents = read_documents(records, self.vocab_size, self.skip_bad_records, counts, corpus.kind)
            batches = iter(lambda: list(next_batch(documents, TOKENIZE_BATCH)), [])
            encoded = (encoder.encode(batch, counts) for batch in batches)
            tokenize.write_tokens(tokenize.with_progress(encoded, counts), folder)
            if not counts["tokens"]:
                raise no_tokens_error(f"--dataset {corpus.source.dataset}", counts)
            return {**counts, "warnings": encoder.warnings() if isinstance(encoder, ChatEncoder) else []}

        return make_once("tokens", identity, make, self.cache_dir)

    def with_doc_ends(self, tokens: Tokens) -> Tokens:
        """The same tokens with known document boundaries. If the files do not have these, one process of a node reads
        all tokens for them, at the first start, and the others map what it found. A UserError if nothing says where
        documents end."""
        if tokens.knows_doc_ends:
            return tokens
        self.check_doc_ends(tokens)

        def write(folder: pathlib.Path) -> dict:
            tokens.file_doc_ends.tofile(folder / "doc_ends.bin")
            return {}

        def find() -> pathlib.Path:
            files = []
            for file in tokens.files:
                index = hashlib.sha256(file.read_doc_ends().data).hexdigest() if file.read_doc_ends else None
                # the dtype of datatrove's .ds without metadata depends on the vocabulary, not on the file
                files.append([file.identity, file.tokens.dtype.str, index])
            folder, _ = make_once("ends", [files, tokens.end_of_text], write, self.cache_dir)
            return folder

        folder = base.broadcast_from_node_main(find, self.is_main)
        return dataclasses.replace(tokens, known_doc_ends=map_numbers(str(folder / "doc_ends.bin"), np.int64))

    def check_doc_ends(self, tokens: Tokens) -> None:
        """Raise a UserError if neither the files nor an end-of-text token say where documents end."""
        if tokens.knows_doc_ends or self.end_of_text is not None:
            return
        subject = f"{self.tokenizer.name_or_path} has" if self.tokenizer else "without a tokenizer there is"
        problem = f"it does not say where its documents end, and {subject} no end-of-text token (eos_token)"
        advice = "give a tokenizer with one, or files with an index"
        raise base.UserError(f"--dataset {tokens.files[0].name}: {problem}; {advice}")

    def pack(self, tokens: Tokens, name: str) -> PackedDataset:
        """Pack tokens as sequences; a UserError, which names the data `name`, if there is no sequence to train on."""
        packing = self.packing or ("best-fit" if tokens.has_loss_mask else "concatenate")
        mask = bool(self.document_mask)
        packed: PackedDataset
        if packing != "concatenate":
            tokenizer = self.tokenizer
            ids = [getattr(tokenizer, "pad_token_id", None), getattr(tokenizer, "eos_token_id", None), 0]
            # an added padding token may have no embedding
            padding = next(token for token in ids if token is not None and token < self.vocab_size)
            tokens = self.with_doc_ends(tokens)
            folder, record = base.broadcast_from_node_main(
                lambda: pack_once(tokens, self.seq_len, packing, self.seed, self.cache_dir), self.is_main
            )
            packed = WholeDocumentDataset(tokens, self.seq_len, folder, record, padding, mask)
        else:
            if mask and any(file.read_doc_ends for file in tokens.files):
                tokens = self.with_doc_ends(tokens)
            elif mask:  # each sequence finds its own, by the end-of-text token
                self.check_doc_ends(tokens)
            packed = PackedDataset(tokens, self.seq_len, mask)
        if packed.left_out and not len(packed):
            problem = f"none of its {base.counted(packed.left_out, 'sequence')} has a token to train on"
            raise base.UserError(f"--dataset {name}: {problem}; use a longer --sequence-length, or other data")
        if not len(packed):
            found = base.counted(len(tokens), "token")
            problem = f"{found}, too few for one sequence of --sequence-length {self.seq_len}"
            raise base.UserError(f"--dataset {name}: {problem}; use a shorter sequence or more text")
        return packed


def no_tokens_error(subject: str, counts: Counter) -> base.UserError:
    """The error for a corpus without a token to train on, from the counts of what was left out."""
    if left_out := counts["conversations without a trained token"]:
        problem = f"none of its {base.counted(left_out, 'conversation')} has a turn with the role assistant"
        return no_mask_error(f"{subject}: {problem} that the template marks")
    if left_out := counts["rows without a trained token"]:
        problem = f"none of its {left_out:,} rows has a token to train on by its labels and masks"
        return base.UserError(f"{subject}: {problem}; fix these, or drop them")
    bad = counts["bad records"]
    without = f", {base.counted(bad, 'bad record')} left out" if bad else ""
    return base.UserError(f"{subject}: it holds no text{without}")
