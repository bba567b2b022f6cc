"""The corpus of tinyseek: the Python sources of CPython 3.13.0's `Lib`, packed and pinned.

What is in: every `*.py` below `Lib` that a person wrote. What is out, and why:

* `test`, `tests`, `idlelib`, `idle_test`, `lib2to3`, `site-packages`, `__pycache__`: not the library, or not
  CPython's own;
* `lib-dynload`, `config-*`, `_sysconfigdata*`: made by the build, different on every machine;
* generated tables, which are data in the shape of code and would be learnt by rote: `pydoc_data`, the charmap
  codecs (any file of `encodings` that assigns `decoding_table` or `decoding_map`), and the files of
  `GENERATED`;
* empty files.

How it is split (fixed before any training): files in the order of the SHA-256 of their path relative to `Lib`
(POSIX separators, UTF-8). Files above 64 KiB are never held out. Walking in that order, files go to *heldout*
until the next one would push its total above 256 KiB; from there on in the same way to *valid*; everything else
is *train*. Held-out files judge the final checkpoint and nothing else; valid files choose between runs.

The pack is an xz stream: one line of JSON (`{split: [[path, size], ...]}`, paths sorted) and the bytes of the
files in that order. Each split's SHA-256 runs over `path NUL size NUL bytes` of its files; the three are pinned
in `PINNED`.

    python experiments/tinyseek/corpus.py --python ~/.pyenv/versions/3.13.0/bin/python --out corpus.xz --heldout DIR
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import re
import subprocess
import sys
from pathlib import Path, PurePosixPath

CPYTHON = "3.13.0"
FILE_LIMIT = 64 * 1024
SPLIT_LIMIT = 256 * 1024
SPLITS = ("train", "valid", "heldout")

EXCLUDED_FOLDERS = {
    "test",
    "tests",
    "idlelib",
    "idle_test",
    "lib2to3",
    "site-packages",
    "__pycache__",
    "lib-dynload",
    "pydoc_data",
}
GENERATED = {
    "_opcode_metadata.py",  # Tools/cases_generator
    "html/entities.py",  # Tools/build/parse_html5_entities.py
    "keyword.py",  # pegen.keywordgen
    "re/_casefix.py",  # Tools/build/generate_re_casefix.py
    "stringprep.py",  # Tools/unicode/mkstringprep.py
    "token.py",  # Tools/build/generate_token.py
}
CHARMAP = re.compile(rb"^decoding_(table|map)\s*=", re.MULTILINE)

PINNED = {
    "train": "54a8cfcffe714a3de4a172a944ba7757b1171758ad24fa38179249d171fa1db0",
    "valid": "890b84833bebf9d7c41c1fee55d0db605f84d9e6a225091f09b4beddd464ca78",
    "heldout": "f2c2f17e362f90ceef18a646ebbfd90f58f3f7e54b27bf887a4149b159be7398",
}

Corpus = dict[str, dict[str, bytes]]


class CorpusError(Exception):
    """The sources on this machine are not the pinned ones."""


def select(lib: Path) -> dict[str, bytes]:
    """All files of the corpus below the `Lib` folder `lib`: {relative POSIX path: bytes}, sorted by path."""
    files: dict[str, bytes] = {}
    for path in sorted(lib.rglob("*.py")):
        rel = PurePosixPath(path.relative_to(lib).as_posix())
        folders = rel.parts[:-1]
        if EXCLUDED_FOLDERS.intersection(folders) or (folders and folders[0].startswith("config-")):
            continue
        if rel.name.startswith("_sysconfigdata") or str(rel) in GENERATED:
            continue
        data = path.read_bytes()
        if not data or (folders[:1] == ("encodings",) and CHARMAP.search(data)):
            continue
        files[str(rel)] = data
    return dict(sorted(files.items()))


def split(files: dict[str, bytes]) -> Corpus:
    """Divide the files by the rule in the module docstring."""
    order = sorted(files, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    queue = [name for name in order if len(files[name]) <= FILE_LIMIT]
    chosen: dict[str, set[str]] = {}
    for part in ("heldout", "valid"):
        chosen[part], total = set(), 0
        while queue and total + len(files[queue[0]]) <= SPLIT_LIMIT:
            total += len(files[queue[0]])
            chosen[part].add(queue.pop(0))
    chosen["train"] = set(files) - chosen["heldout"] - chosen["valid"]
    return {part: {name: files[name] for name in sorted(chosen[part])} for part in SPLITS}


def digest(files: dict[str, bytes]) -> str:
    """SHA-256 over `path NUL size NUL bytes` of the files, sorted by path."""
    h = hashlib.sha256()
    for name in sorted(files):
        h.update(name.encode() + b"\0" + str(len(files[name])).encode() + b"\0" + files[name])
    return h.hexdigest()


def check(corpus: Corpus) -> None:
    """Raise CorpusError unless every split has its pinned SHA-256 and no file is in two splits."""
    names = [name for part in SPLITS for name in corpus[part]]
    if len(names) != len(set(names)):
        raise CorpusError("a file is in two splits of the pack; pack it again with corpus.py")
    for part in SPLITS:
        if (got := digest(corpus[part])) != PINNED[part]:
            raise CorpusError(
                f"{part}: SHA-256 {got}, pinned {PINNED[part]}; give the unmodified Lib of CPython {CPYTHON}"
            )


def write_pack(corpus: Corpus, path: Path) -> None:
    """Write the pack (format in the module docstring)."""
    index = {part: [[name, len(data)] for name, data in corpus[part].items()] for part in SPLITS}
    blob = b"".join(data for part in SPLITS for data in corpus[part].values())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(json.dumps(index).encode() + b"\n" + blob, preset=9 | lzma.PRESET_EXTREME))


def read_pack(path: Path) -> Corpus:
    """Read a pack and check it against the pins; CorpusError when it is not the pinned corpus."""
    line, _, blob = lzma.decompress(path.read_bytes()).partition(b"\n")
    corpus: Corpus = {}
    at = 0
    for part, entries in json.loads(line).items():
        corpus[part] = {}
        for name, size in entries:
            corpus[part][name] = blob[at : at + size]
            at += size
    check(corpus)
    return corpus


def write_heldout(corpus: Corpus, folder: Path) -> None:
    """Ship the held-out files, unmodified: `folder/<path>.txt` (a .py here would pass for code of the package)."""
    for name, data in corpus["heldout"].items():
        target = folder / f"{name}.txt"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def read_heldout(folder: Path) -> dict[str, bytes]:
    """The shipped held-out files, checked against the pin: {path relative to Lib: bytes}."""
    paths = folder.rglob("*.py.txt")
    files = {p.relative_to(folder).as_posix().removesuffix(".txt"): p.read_bytes() for p in paths}
    files = dict(sorted(files.items()))
    if (got := digest(files)) != PINNED["heldout"]:
        raise CorpusError(f"{folder}: held-out files have SHA-256 {got}, pinned {PINNED['heldout']}; restore them")
    return files


def lib_of(python: str) -> Path:
    """The `Lib` folder of the interpreter `python`, which must be CPython `CPYTHON`."""
    code = "import platform, sysconfig; print(platform.python_version()); print(sysconfig.get_path('stdlib'))"
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    version, lib = done.stdout.split("\n")[:2]
    if version != CPYTHON:
        raise CorpusError(f"{python} is CPython {version}; the corpus is pinned to {CPYTHON}")
    return Path(lib)


def main() -> int:
    parser = argparse.ArgumentParser(description="pack tinyseek's corpus and check it against its pins")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--lib", type=Path, help=f"the Lib folder of CPython {CPYTHON}")
    source.add_argument("--python", help=f"a CPython {CPYTHON} executable, whose Lib is taken")
    parser.add_argument("--out", type=Path, required=True, help="the pack to write (.xz)")
    parser.add_argument("--heldout", type=Path, help="also write the held-out files into this folder")
    args = parser.parse_args()
    try:
        corpus = split(select(args.lib or lib_of(args.python)))
        for part in SPLITS:
            size = sum(map(len, corpus[part].values()))
            print(f"{part:8} {len(corpus[part]):4} files {size:9,} bytes  sha256 {digest(corpus[part])}")
        check(corpus)
    except CorpusError as error:
        print(f"corpus.py: {error}", file=sys.stderr)
        return 1
    write_pack(corpus, args.out)
    if args.heldout:
        write_heldout(corpus, args.heldout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
