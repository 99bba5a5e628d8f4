"""Token files: corpora that are tokenized already, mapped and joined into one array of tokens without a copy. Called by
`utils.get_dataset` and by the script. Independent of how each format is laid out (`readers`)."""

import functools
import pathlib

import numpy as np

from harness.base import UserError, counted, shortened
from harness.data.documents import token_dtype
from harness.data.formats import can_map, map_tokens, reader_of
from harness.data.mapped import TokenFile
from harness.data.records import DEFAULT_FIELD, Field


class JoinedTokens:
    """The tokens of several mapped files end to end. Only the tokens of a slice are read, and checked against the
    vocabulary there."""

    def __init__(self, files: list[TokenFile], vocab_size: int):
        self.files, self.vocab_size = files, vocab_size
        self.dtype = np.dtype(token_dtype(vocab_size))
        of_files = [(piece, file.mapping) for file in files for piece in file.pieces if len(piece)]
        self.pieces = [piece for piece, _ in of_files]
        self.mappings = [mapping for _, mapping in of_files]
        self.offsets = [mapping.offset_of(piece) for piece, mapping in of_files]  # in bytes
        self._ends: dict[int, np.ndarray | None] = {}  # of the documents of each file that was asked for
        sizes = [len(piece) for piece in self.pieces]
        self.before = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])  # tokens before each piece, and all
        file_sizes = [sum(len(piece) for piece in file.pieces) for file in files]
        self.before_files = np.concatenate([[0], np.cumsum(file_sizes, dtype=np.int64)])

    def __len__(self) -> int:
        return int(self.before[-1])

    def __getitem__(self, window: slice) -> np.ndarray:
        """These tokens as unsigned integers, a view where one file of that type holds them all. A UserError where one
        has no embedding."""
        position, stop, _ = window.indices(len(self))
        number = int(np.searchsorted(self.before, position, "right")) - 1
        parts = []
        while position < stop:
            first = int(self.before[number])
            until = min(stop, int(self.before[number + 1]))
            tokens = self.pieces[number][position - first : until - first]
            self.mappings[number].read_ahead(self.offsets[number] + (position - first) * tokens.itemsize, tokens.nbytes)
            parts.append(self.check(tokens, position))
            position, number = until, number + 1
        if not parts:
            return np.empty(0, self.dtype)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def check(self, tokens: np.ndarray, position: int) -> np.ndarray:
        """The tokens that begin at a position, in the smallest type that holds the vocabulary."""
        if not tokens.dtype.isnative:
            tokens = tokens.astype(tokens.dtype.newbyteorder("="))
        unsigned = tokens.view(f"u{tokens.itemsize}")  # a negative id is huge
        if np.iinfo(unsigned.dtype).max >= self.vocab_size and unsigned.max(initial=0) >= self.vocab_size:
            wrong = int((unsigned >= self.vocab_size).argmax())
            fault = f"token id {tokens[wrong]}, the model has {self.vocab_size:,}"
            raise UserError(
                f"--dataset {self.place(position + wrong)}: {fault}; it was made with another tokenizer, or is damaged"
            )
        return unsigned.astype(self.dtype, copy=False)

    @functools.cached_property
    def document_ends(self) -> np.ndarray | None:
        """Where each document ends, int64, ascending, the last one at the end; None where a file does not say it. The
        ends of several files take 8 bytes a document in memory."""
        ends_of_files = [self.ends_of_file(number) for number in range(len(self.files))]
        if any(ends is None for ends in ends_of_files):
            return None
        ends = ends_of_files[0]
        if len(ends_of_files) > 1:
            moved = [ends + first for ends, first in zip(ends_of_files, self.before_files[:-1], strict=True)]
            ends = np.concatenate(moved)
        is_empty = ends == np.concatenate([[0], ends[:-1]])
        return ends[~is_empty] if is_empty.any() else ends

    def ends_of_file(self, number: int) -> np.ndarray | None:
        """Where each document of a file ends, counted in tokens of the file, empty ones too."""
        if number not in self._ends:
            find_ends = self.files[number].document_ends
            self._ends[number] = find_ends() if find_ends else None
        return self._ends[number]

    def place(self, position: int) -> str:
        """A token's file, document (from 1 on) and offset (from 0 on), as messages name them."""
        name, offset = self.document_of(position)
        return f"{name}, token {offset:,}"

    def document_of(self, position: int) -> tuple[str, int]:
        """(the file and document that a token is in, in words; how many tokens of it are before). Where the file has no
        ends of documents, it is counted from the file's beginning."""
        number = int(np.searchsorted(self.before_files, position, "right")) - 1
        file, in_file = self.files[number], position - int(self.before_files[number])
        ends = self.ends_of_file(number)
        if ends is None:
            return str(file.file), in_file
        document = int(np.searchsorted(ends, in_file, "right"))
        start = int(ends[document - 1]) if document else 0
        return f"{file.file}, document {document + 1:,}", in_file - start

    def documents(self, first: int, last: int) -> list[tuple[str, int]]:
        """(document, offset of its first token there) for each document in the tokens from `first` to before `last`, as
        `document_of` names them."""
        found = []
        position = first
        while position < last:
            found.append(self.document_of(position))
            position = self.end_after(position)
        return found

    def end_after(self, position: int) -> int:
        """Where the document of a token ends; the file's end where it has no ends of documents."""
        number = int(np.searchsorted(self.before_files, position, "right")) - 1
        before = int(self.before_files[number])
        ends = self.ends_of_file(number)
        if ends is None:
            return int(self.before_files[number + 1])
        return before + int(ends[np.searchsorted(ends, position - before, "right")])

    @property
    def tokenizer_name(self) -> str | None:
        """The tokenizer that made the files, None where they do not say."""
        return next((file.tokenizer for file in self.files if file.tokenizer), None)

    def describe(self) -> str:
        """What the files were taken for, in words."""
        kinds = list(dict.fromkeys(file.kind for file in self.files))
        tokenizer = f"tokenized by {self.tokenizer_name}" if self.tokenizer_name else "tokenizer not known"
        return f"read in place, {counted(len(self.files), 'file')} ({shortened(kinds, 2)}), {tokenizer}"


def is_mapped(files: list[pathlib.Path], text_field: Field = DEFAULT_FIELD) -> bool:
    """Whether local files are token files, which are mapped: at random access, with nothing to tokenize or to stream. A
    UserError where only some are and the others cannot be read with them."""
    mapped = [file for file in files if can_map(file, text_field)]
    readers = {reader_of(file) for file in mapped}
    others = [file for file in files if file not in set(mapped)]
    if not others and len(readers) <= 1:
        return bool(mapped)
    if all(hasattr(reader_of(file), "read") for file in files):  # such as Arrow files, some of them compressed
        return False
    one = mapped[0]
    other = others[0] if others else next(file for file in mapped if reader_of(file) != reader_of(one))
    raise UserError(
        f"--dataset: {one} has tokens that are read in place, {other} is of another format; "
        f"name a folder or pattern with one of them, such as '{one.parent}/*{one.suffix}'"
    )


def open_token_files(files: list[pathlib.Path], text_field: Field, vocab_size: int) -> JoinedTokens:
    """The tokens of files of one format. A UserError where one is damaged, or where two were made by tokenizers of
    different names."""
    opened = [map_tokens(file, text_field, vocab_size) for file in files]
    known = [file for file in opened if file.tokenizer]
    for file in known:
        if file.tokenizer != known[0].tokenizer:
            names = f"{known[0].file} was tokenized by {known[0].tokenizer}, {file.file} by {file.tokenizer}"
            raise UserError(f"--dataset: {names}; name files of one tokenizer")
    return JoinedTokens(opened, vocab_size)


def differing_tokenizer(tokens: JoinedTokens, tokenizer) -> str:
    """A warning where the files name another tokenizer than the run's; "" where they do not, or name none. A path and a
    hub id are the same where their last part is."""
    theirs = tokens.tokenizer_name
    if theirs is None or tokenizer is None or last_part(theirs) == last_part(tokenizer.name_or_path):
        return ""
    return (
        f"--tokenizer {tokenizer.name_or_path}: {tokens.files[0].file} was tokenized by {theirs}; "
        "stories and prompts are wrong unless both are the same"
    )


def last_part(name: str) -> str:
    """The last part of a tokenizer's name: SmolLM3-3B of /models/SmolLM3-3B/tokenizer.json, as of the hub id."""
    return name.removesuffix("/tokenizer.json").rstrip("/").rpartition("/")[2]
