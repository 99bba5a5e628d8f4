"""Private names of `datasets` that this program needs. Each stands with why no
public name does the same; tests/base/test_internals.py compares NAMES with the installed packages. No package is
imported before it is used. Independent of what they are used for."""

# Owner, a module or "module:class", and what is used of it.
NAMES = {"datasets:Dataset": ("_fingerprint",)}


def content_fingerprint(dataset) -> str:
    """What `datasets` names a data set's cache by: another one where its rows are others. Its guide to the cache has
    this name."""
    return dataset._fingerprint
