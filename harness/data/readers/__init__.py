"""Readers: one module for each format of corpus files. `harness.data.formats` finds every module of this folder.

A reader has `SUFFIXES`, the ends of its files' names; `PLACE`, what the number of a record counts ("line", "row");
`RECORDS`, the plural of what it reads; and `read(file, text_field, counts, batched)`, a generator that gives, for each
record in order, its text, its token ids, or a `records.BadRecord` that says what is wrong and where. What cannot be
read at all is an OSError or a ValueError.
"""
