"""A corpus: one split of local files or of a data set of the hub, tokenized once into the token cache. Called by
`utils.get_dataset`."""

import dataclasses
import hashlib
import itertools
import json
import pathlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from harness.base import UserError
from harness.base.package_internals import content_fingerprint
from harness.data.chat import ChatFormat, example_batches, holds_conversations, no_assistant_mask
from harness.data.documents import TOKENIZE_BATCH, read_documents, token_batches, vocabulary_of
from harness.data.formats import file_records, file_status, file_version
from harness.data.hub_rows import hub_records, load_documents
from harness.data.records import CHAT_FIELD, Field
from harness.data.splits import files_of_split
from harness.data.storage import DataFile
from harness.data.token_cache import check_cache, pack_conversations, pack_tokens

CACHE_VERSION = 2  # of the flat files; another one makes them anew


@dataclass(frozen=True)
class Corpus:
    """One split of a corpus, and how it becomes tokens."""

    dataset: str  # as messages name it
    split: str
    files: list[DataFile]  # in order; none of a hub data set
    rows: Any  # of the hub where there are no files: a `datasets.Dataset`
    tokenizer: Any
    vocab_size: int
    text_field: Field
    chat: ChatFormat | None = None  # of a corpus of conversations

    def identity(self) -> str:
        """All that decides which tokens come out: documents (path, size, time; a hub data set's fingerprint),
        tokenizer and vocabulary."""
        if self.files:
            content: Any = [file_version(file) for file in self.files]
        else:
            content = content_fingerprint(self.rows)
        fields = [self.text_field] if isinstance(self.text_field, str) else self.text_field[-1]
        vocabulary = [vocabulary_of(self.tokenizer), self.tokenizer.eos_token_id, self.vocab_size]
        chat = self.chat.identity() if self.chat else []
        return json.dumps([CACHE_VERSION, self.dataset, self.split, content, fields, *vocabulary, *chat])

    def token_batches(
        self, skip_bad_records: bool, counts: Counter, progress: Callable[[Counter, int], None]
    ) -> Iterator:
        """The token ids of all documents, in arrays; of conversations what `example_batches` gives. `progress` gets the
        counts so far and what "read" will reach."""
        if self.files:
            sources = [(file, file_records(file, self.text_field, counts, batched=True)) for file in self.files]
            total = sum(file_status(file).st_size for file in self.files)
        else:
            sources = [(self.dataset, hub_records(self.rows, self.dataset, self.text_field, counts, batched=True))]
            total = len(self.rows)
        if self.chat:
            sources = [(source, self.chat.encode_records(records, counts)) for source, records in sources]
        documents = itertools.chain.from_iterable(
            read_documents(records, source, skip_bad_records, counts) for source, records in sources
        )
        if self.chat:
            batches = example_batches(documents, TOKENIZE_BATCH, counts)
        else:
            batches = token_batches(documents, self.tokenizer, TOKENIZE_BATCH, counts)
        for tokens in batches:
            progress(counts, total)
            yield tokens

    def as_chat(self, template: str | None, loss: str) -> "Corpus":
        """The corpus with conversations as its documents, where its records are such, see `holds_conversations`; a
        UserError where these cannot be masked. Any other corpus as it is."""
        if not holds_conversations(self.files, self.rows, self.text_field):
            return self
        chat = ChatFormat(self.tokenizer, template, loss)
        chat.check(self.dataset)
        return dataclasses.replace(self, text_field=CHAT_FIELD, chat=chat)

    def check_trained(self, counts: dict) -> None:
        """Raises a UserError for conversations none of which has a token to train on."""
        left_out = counts.get("conversations without a trained token", 0)
        if self.chat and left_out and not counts.get("documents"):
            raise no_assistant_mask(
                f"--dataset {self.dataset}: the chat template marks no token of any of the {left_out:,} conversations"
            )


def open_corpus(
    dataset: str,
    split: str,
    files: list[DataFile],
    tokenizer,
    vocab_size: int,
    text_field: Field,
    subset: str | None = None,
) -> Corpus:
    """The corpus of a split of local `files` or, where there are none, of a data set of the hub."""
    if files:
        return Corpus(dataset, split, files_of_split(dataset, split, files), None, tokenizer, vocab_size, text_field)
    return Corpus(dataset, split, [], load_documents(dataset, split, subset), tokenizer, vocab_size, text_field)


def tokenize_once(
    corpus: Corpus,
    cache: pathlib.Path,
    skip_bad_records: bool,
    check_whole: bool,
    progress: Callable[[Counter, int], None],
) -> tuple[pathlib.Path, dict]:
    """The flat file of a corpus' tokens in the folder `cache`, made now where there is none that is whole, and what was
    counted. `counts["seconds"]` is there where it was made now, and `counts["damaged"]` says what was wrong with an
    older one.

    A UserError where the folder cannot be written or the corpus holds no text.
    """
    from filelock import FileLock

    name = hashlib.sha256(corpus.identity().encode()).hexdigest()[:20]
    path = cache.expanduser() / f"tokens-{name}.bin"
    counts, problem = check_cache(path, skip_bad_records, check_whole)
    if counts is not None:
        return path, counts
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):  # two runs that start together, or nodes with a common disk
            counts, problem = check_cache(path, skip_bad_records, check_whole)
            if counts is not None:
                return path, counts
            start, counts = time.perf_counter(), Counter()
            batches = corpus.token_batches(skip_bad_records, counts, progress)
            pack_batches = pack_conversations if corpus.chat else pack_tokens
            if not pack_batches(batches, path, corpus.vocab_size, counts):
                corpus.check_trained(counts)
                raise UserError(f"--dataset {corpus.dataset}: it holds no text ({counts['bad records']} bad)")
            return path, dict(counts, seconds=time.perf_counter() - start, damaged=problem)
    except OSError as error:
        raise UserError(f"--cache-dir {path.parent}: cannot be written ({error.strerror})") from error
