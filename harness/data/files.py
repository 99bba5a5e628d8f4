"""Files: the data files that a name of --dataset stands for (a file, folder, pattern, URL or data set of the hub), the
split of each, and what is left out. A run lists a corpus once, on rank 0."""

import glob
import logging
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from harness import base, flags
from harness.data import formats, stores
from harness.data.data_file import COMPRESSIONS, DataFile

# The words of names and the patterns are those of `datasets.data_files`.
SPLIT_KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
SEPARATOR = r"[-._ 0-9]"  # around a keyword in a name
SHARD = re.compile(r"data/([^/]*)-[0-9]{5}-of-[0-9]{5}[^/]*\.[^/]*")  # data/SPLIT-00000-of-00001.*
NO_DATA = re.compile(  # in a folder; cache-*.arrow are the results of maps and filters of `datasets`
    r"readme\.md|config\.json|dataset_infos?\.json|dataset_dict\.json|state\.json|cache-.*\.arrow"
)


@dataclass(frozen=True)
class Listing:
    """The files of a corpus."""

    dataset: str  # its name in --dataset
    splits: dict[str, list[DataFile]]
    left_out: list[str]  # names of files that are not read, some with the reason
    is_hub: bool = False

    def files_in_split(self, split: str) -> list[DataFile]:
        """Return the files of a split; a UserError if there are none."""
        if split not in self.splits:
            names = ", ".join(self.splits)
            problem = f"has no split {split!r}, only {names}"
            raise base.UserError(
                f"--dataset {self.dataset}: {problem}; give one of these, as with --dataset-split, or its files"
            )
        return self.splits[split]

    def describe(self, trained: str) -> str:
        """Return the header's line about files that are not in the split `trained`; "" if all are."""
        names = {split: [file.name for file in files] for split, files in self.splits.items()}
        names["left out"] = self.left_out
        total = sum(map(len, names.values()))
        others = [f"{split}: {base.shortened(files)}" for split, files in names.items() if files and split != trained]
        return f"{len(names[trained]):,} of {total:,} ({'; '.join(others)})" if others else ""


def find_files(dataset: str, subset: str | None = None) -> Listing:
    """List the data files of a file, folder, pattern, URL or data set of the hub; a UserError if there are none."""
    path = os.path.expanduser(dataset)
    left_out: list[str] = []
    if base.is_url(path):
        is_pattern = stores.has_pattern(path)
        candidates = [DataFile.from_store(url, info) for url, info in stores.list_url(path)]
    elif os.path.exists(path) or glob.has_magic(path):
        is_pattern = not os.path.exists(path)
        candidates, left_out = list_paths(path)
    elif formats.find_format(dataset) or not flags.may_be_on_the_hub(dataset):
        hint = f"; there is {dataset}.bin" if os.path.exists(f"{path}.bin") else ""  # Megatron omits the suffix
        raise base.UserError(f"--dataset {dataset}: no such file or folder{hint}")
    else:
        return find_on_hub(dataset, subset)
    if [file.path for file in candidates] == [path]:  # a single file, no folder or pattern
        if formats.find_format(candidates[0].name):
            return Listing(dataset, {"train": candidates}, [])
        raise base.UserError(f"--dataset {dataset}: {describe_no_data([candidates[0].name])}")
    top = stores.before_pattern(path) if is_pattern else path.rstrip("/")  # the splits are in the paths below it
    names = {file: str(file).removeprefix(top).lstrip("/") for file in candidates}
    is_dataset_dict = "dataset_dict.json" in names.values()  # of `save_to_disk`: each folder is a split
    files = []
    # by folder: a/z before a-b/a, though "-" is before "/"
    for file in sorted(candidates, key=lambda file: file.path.split("/")):
        name = names[file]
        if any(part.startswith(".") for part in name.split("/")):
            continue
        if is_data(file.name):
            files.append(file)
        elif not file.name.endswith(formats.companions()):
            left_out.append(name if name.isprintable() else ascii(name))
    if not all(map(is_fallback, files)):
        left_out += [names[file] for file in files if is_fallback(file)]
        files = [file for file in files if not is_fallback(file)]
    if not files:
        raise base.UserError(f"--dataset {dataset}: {describe_no_data(left_out)}")
    splits: dict[str, list[DataFile]] = {}
    paths = [names[file] for file in files]
    found_splits = [path.partition("/")[0] for path in paths] if is_dataset_dict else find_splits(dataset, paths)
    for file, split in zip(files, found_splits, strict=True):
        splits.setdefault(split, []).append(file)
    unnamed = splits.pop("", [])
    if "train" in splits:  # such as input.txt of nanoGPT, next to train.bin and val.bin
        left_out += [f"{names[file]} (not in a split)" for file in unnamed]
    elif unnamed:
        splits = {"train": unnamed} | splits
    return Listing(dataset, splits, sorted(left_out))


def is_data(name: str) -> bool:
    """True if a file of a folder is read, by its name."""
    return formats.find_format(name) is not None and not NO_DATA.fullmatch(name.lower())


def is_fallback(file: DataFile) -> bool:
    """True for a file that is data only if the corpus has no data files of other formats."""
    return getattr(formats.find_format(file.name), "IS_FALLBACK", False)


def find_splits(dataset: str, names: list[str]) -> list[str]:
    """Return the split of each file by its path in the corpus, "" for none, as `datasets` does: by shards in `data`,
    else by the names of folders, else by those of files. A UserError for a name with the keywords of two splits."""
    splits = [shard[1] if (shard := SHARD.fullmatch(name)) else "" for name in names]
    if not any(splits):
        splits = [split_in(dataset, name, name.split("/")[:-1]) for name in names]
    if "train" in splits or all(splits):
        return splits
    path_splits = [split or split_in(dataset, name, name.split("/")) for split, name in zip(splits, names, strict=True)]
    if not any(splits):
        return path_splits
    # Folders name splits, but not train: the files outside of them are trained on, unless a file's own name has another
    # split. A file named train among them gets no split either: with a split "train", `find_files` would leave out the
    # other files outside.
    return ["" if split == "train" else split for split in path_splits]


def split_in(dataset: str, name: str, parts: list[str]) -> str:
    """Return the split whose keyword is between separators in one of the `parts` of a path; "" for none."""
    words = {word for part in parts for word in re.split(f"{SEPARATOR}+", part)}
    found = [split for split, keywords in SPLIT_KEYWORDS.items() if words.intersection(keywords)]
    if len(found) > 1:
        problem = f"the name {name} has keywords of two splits, {' and '.join(found)}"
        raise base.UserError(f"--dataset {dataset}: {problem}; rename it, or give the files of one split")
    return found[0] if found else ""


def describe_no_data(left_out: list[str]) -> str:
    suffixes, compressions = "/".join(formats.suffixes()), "/".join(COMPRESSIONS)
    seen = f"there is only {base.shortened(left_out)}; convert it" if left_out else "there are no files"
    return f"needs {suffixes} files, which may be compressed as {compressions}; {seen}"


def list_paths(path: str) -> tuple[list[DataFile], list[str]]:
    """Return (the regular files at a path, in a folder or matching a pattern, each real file once; what is left
    out)."""
    paths: Iterable[str] = [path]
    if os.path.isdir(path):
        paths = walk(path)
    elif not os.path.exists(path):
        paths = [found for found in glob.glob(path, recursive=True) if not os.path.isdir(found)]
    files: dict[str, DataFile] = {}
    left_out = []
    for found in sorted(paths, key=lambda found: (os.path.islink(found), found)):  # files before links to them
        name = os.path.relpath(found, path) if os.path.isdir(path) else found
        real = os.path.realpath(found)
        if real in files:
            left_out.append(f"{name} (the same as {os.path.relpath(files[real].path, os.path.dirname(found))})")
        elif os.path.isfile(found):
            files[real] = DataFile.from_path(found)
        else:
            left_out.append(f"{name} (no regular file)")
    return list(files.values()), left_out


def walk(top: str) -> Iterator[str]:
    """Yield the files in a folder and its subfolders, each real folder once, without hidden ones."""
    entered: set[str] = set()

    def refuse(error: OSError) -> None:
        problem = f"cannot be read ({base.first_line(error)})"
        raise base.UserError(f"--dataset {top}: {problem}; make it readable, or give the files")

    for folder, below, names in os.walk(top, onerror=refuse, followlinks=True):
        real = os.path.realpath(folder)
        if real in entered:
            below.clear()
            continue
        entered.add(real)
        below.sort(key=lambda name: os.path.islink(os.path.join(folder, name)))  # enter a folder before links to it
        below[:] = [name for name in below if not name.startswith(".")]
        yield from (os.path.join(folder, name) for name in names if not name.startswith("."))


def find_on_hub(dataset: str, subset: str | None) -> Listing:
    """List the files of a data set of the hub, by split, as `datasets` resolves them; without a network those that were
    downloaded before. No code of the data set is run."""
    base.set_hub_offline_without_network(dataset)  # before the imports, which read HF_HUB_OFFLINE
    import datasets
    from huggingface_hub import constants, snapshot_download

    datasets.utils.logging.set_verbosity(logging.CRITICAL)  # it logs what the UserError says
    source = dataset
    try:
        if constants.HF_HUB_OFFLINE:
            source = snapshot_download(dataset, repo_type="dataset", local_files_only=True)
        found = datasets.load_dataset_builder(source, subset).config.data_files or {}
    except Exception as error:
        cause = base.first_line(stores.root_of(error))
        problem = f"neither a local file or folder, nor available from the hub ({cause})"
        hint = f"without a network use a local {'/'.join(formats.suffixes())} file or folder, 'synthetic' or 'demo'"
        raise base.UserError(f"--dataset {dataset}: {problem}; {hint}") from error
    # one request lists the files of each data set at a revision, hf://datasets/OWNER/NAME@REVISION
    matches = [re.match("hf://[^/]+/[^/]+/[^/]+", path) for paths in found.values() for path in paths]
    infos: dict[str, dict] = {}
    for root in {match[0] for match in matches if match}:
        infos.update(stores.list_url(root))
    splits, left_out = {}, []
    for split, paths in found.items():
        files = []
        for path in paths:
            name = path.rpartition("/")[2]
            if is_data(name):
                files.append(hub_file(path, infos))
            else:
                left_out.append(name)
        if files:
            splits[str(split)] = files
    if not splits:
        raise base.UserError(f"--dataset {dataset}: {describe_no_data(left_out)}")
    return Listing(dataset, splits, left_out, is_hub=True)


def hub_file(path: str, infos: dict[str, dict]) -> DataFile:
    """Return a file that `datasets` resolved; `infos` has the hub's information on files, by URL."""
    if not base.is_url(path):
        return DataFile.from_path(path)
    return DataFile.from_store(path, infos.get(path) or stores.request(path, "info"))
