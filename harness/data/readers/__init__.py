"""Readers: one module for each format of corpus files. `harness.data.formats` finds every module of this folder.

A reader has `SUFFIXES`, the ends of its files' names; `PLACE`, what the number of a record counts ("line", "row");
`RECORDS`, the plural of what it reads; `HAS_FIELDS = False` where a record has no fields that --text-field could name;
and `read(file, text_field, counts, batched)`, a generator that gives, for each record in order, its text, its token
ids, or a `records.BadRecord` that says what is wrong and where. What cannot be read at all is an OSError or a
ValueError. `SUFFIXES` and `HAS_FIELDS` are literals: `harness.flags` reads them without importing the module.
"""
