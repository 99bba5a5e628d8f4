"""Readers: one module for each format of corpus files. `harness.data.formats` finds every module of this folder.

A reader has `SUFFIXES`, the ends of its files' names, and one or both of these:

- `read(file, text_field, counts, batched)`, a generator that gives, for each record in order, its text, its token ids,
  or a `records.BadRecord` that says what is wrong and where. With it go `PLACE`, what the number of a record counts
  ("line", "row"), and `RECORDS`, the plural of what it reads. What it gives goes through the token cache, text before
  that through the tokenizer.
- `open_tokens(file, text_field, vocab_size)`, which maps a file of token ids and returns a `mapped.TokenFile`. Tokens
  are neither copied nor read. What can be checked of the file cheaply is checked here; a fault is `mapped.damaged`.
  A reader that has `read` too says in `holds_tokens(file, text_field)` which files it can map.

A reader of records whose files can be cut among streams also has `read_range(file, text_field, counts, start, end)`,
which gives the records that begin within these bytes of a file that is not packed, numbered from 1 on, and
`count_before(file, start)`: how many lines or rows stand before these. Ranges end to end must hold each record once.
Of files of other readers each stream reads all and takes its share.

What cannot be read at all is an OSError or a ValueError. `HAS_FIELDS = False` is for records without fields that
--text-field could name. `BESIDE` is the suffix of a second file that must be beside each file of this reader; without
it the file is another reader's. `COMPANIONS` has the ends of names of files that belong to a data file, and what that
file has in place of them, "" where it may be missing; `COMPANION_NAMES` has whole names of such files.
`leave_out(file)` says why a file with the suffix is no data, "" for one that is. `SUFFIXES` and `HAS_FIELDS` are
literals: `harness.flags` reads them without importing the module.
"""
