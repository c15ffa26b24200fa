"""Text to train on, and the byte-level BPE that cuts it into tokens."""

from __future__ import annotations

import codecs
import hashlib
import os
import random
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.options import UsageError

END = "<|endoftext|>"
# More text than this changes nothing in a run of minutes, and would have to fit in memory.
MAX_BYTES = 256 * 2**20
_PIECE = 2**16
# Part of the cache key: raise it when the training below changes.
_RECIPE = "byte-level BPE, 1"
# Other people's code, tests, and folders of generated tables.
_SKIPPED_FOLDERS = {
    *("site-packages", "dist-packages", "__pycache__"),
    *("test", "tests", "idle_test"),
    *("encodings", "pydoc_data"),
}


@dataclass
class Text:
    """Documents and where they are from."""

    source: str
    documents: list[str]

    @property
    def size(self) -> int:
        """Bytes of UTF-8."""
        return sum(len(document.encode()) for document in self.documents)


@dataclass
class Tokens:
    """A tokenizer and the text in its tokens."""

    tokenizer: Any
    ids: Any  # int64 (n,)
    end_id: int
    vocab: int
    origin: str

    def decode(self, ids: list[int]) -> str:
        """The text of token ids."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def read_text(files: list[Path]) -> Text:
    """Reads the user's files, or the standard library's sources when there are none.

    Raises:
        UsageError: A file can't be read, or is empty or no text.
    """
    if not files:
        return _standard_library()
    left = MAX_BYTES
    documents = []
    for path in files:
        document, size = _read(path, left)
        left -= size
        documents.append(document)
        if left <= 0:
            break
    names = ", ".join(path.name for path in files[:3]) + (", ..." if len(files) > 3 else "")
    return Text(names, documents)


def _read(path: Path, limit: int) -> tuple[str, int]:
    if not path.exists():
        raise UsageError(f"--text {path} does not exist")
    if not path.is_file():
        raise UsageError(f"--text {path} is not a file")
    try:
        with path.open("rb") as file:
            data = file.read(limit)
            whole = not file.read(1)
    except OSError as error:
        raise UsageError(f"--text {path} can't be read: {error.strerror}") from None
    if not data.strip():
        raise UsageError(f"--text {path} is empty")
    try:
        if b"\0" in data:
            raise ValueError("a zero byte")
        document = codecs.getincrementaldecoder("utf-8-sig")().decode(data, final=whole)
    except ValueError:
        raise UsageError(f"--text {path} is binary or not UTF-8; it must be UTF-8 text") from None
    return document, len(data)


def _standard_library() -> Text:
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - _SKIPPED_FOLDERS)
        for name in sorted(files):
            if name.endswith(".py"):
                try:
                    document = Path(folder, name).read_text(encoding="utf-8")
                except (OSError, UnicodeDecodeError):
                    continue  # lib2to3 and friends ship a few files that are broken on purpose
                if document.strip():
                    documents.append(document)
    if not documents:
        raise UsageError(
            f"this Python has no sources of its standard library in {root}; use --text FILE"
        )
    return Text(f"standard library of Python {sysconfig.get_python_version()}", documents)


def cache_folder() -> Path:
    """The folder of trained tokenizers; `TORCHWELD_CACHE_DIR` overrides it."""
    given = os.environ.get("TORCHWELD_CACHE_DIR")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "torchweld"


def train_tokenizer(text: Text, vocab: int) -> tuple[Any, str]:
    """A byte-level BPE of the text, from the cache if it was trained before.

    Args:
        text: The training text.
        vocab: Tokens, `END` included; a small text may give fewer.

    Returns:
        The tokenizer, and "trained" or "cached".
    """
    from tokenizers import Tokenizer

    digest = hashlib.sha256(f"{_RECIPE}, {vocab} tokens\n".encode())
    for document in text.documents:
        data = document.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    try:
        path = cache_folder() / f"bpe-{vocab}-{digest.hexdigest()[:24]}.json"
    except RuntimeError:  # no home directory
        path = None
    if path is not None:
        try:
            tokenizer = Tokenizer.from_file(str(path))
            if tokenizer.token_to_id(END) is not None and tokenizer.get_vocab_size() <= vocab:
                return tokenizer, "cached"
        except Exception:  # absent, or damaged: tokenizers raises plain Exception for both
            pass
    tokenizer = _train(text, vocab)
    if path is not None:
        _keep(tokenizer.to_str(), path)
    return tokenizer, "trained"


def _train(text: Text, vocab: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_chunks(text.documents), trainer)
    return tokenizer


def _keep(content: str, path: Path) -> None:
    # A cache that can't be written costs seconds next time, nothing else.
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=".bpe-", delete=False
        ) as file:
            temporary = file.name
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


def checkpoint_tokenizer(folder: Path) -> Any | None:
    """The tokenizer of a Hugging Face directory, or None if it has none.

    Raises:
        UsageError: It has one that can't be read.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    whole, vocab, merges = (folder / n for n in ("tokenizer.json", "vocab.json", "merges.txt"))
    try:
        if whole.is_file():
            return Tokenizer.from_file(str(whole))
        if vocab.is_file() and merges.is_file():
            tokenizer = Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
            return tokenizer
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"--checkpoint {folder} has a damaged tokenizer: {reason}") from None
    return None


def _chunks(documents: list[str]) -> Iterator[str]:
    """Documents in parts of some 64 KiB that end at line ends, so that all cores get work."""
    for document in documents:
        start = 0
        while start < len(document):
            end = start + _PIECE
            if end < len(document):
                cut = document.rfind("\n", start, end) + 1
                end = cut if cut > start else end
            yield document[start:end]
            start = end


def encode(text: Text, tokenizer: Any, end_id: int, need: int, seed: int) -> Any:
    """The text as token ids, documents in random order, each followed by `end_id`.

    Args:
        text: The documents.
        tokenizer: From `tokenizers`.
        end_id: Token between documents.
        need: Stop when there are so many tokens; encoding the rest would be time lost.
        seed: Of the order.

    Returns:
        int64 `(n,)`.
    """
    import torch

    order = list(range(len(text.documents)))
    random.Random(seed).shuffle(order)
    ids: list[int] = []
    for index in order:
        chunks = list(_chunks([text.documents[index]]))
        for start in range(0, len(chunks), 16):
            if len(ids) < need:
                for encoding in tokenizer.encode_batch(
                    chunks[start : start + 16], add_special_tokens=False
                ):
                    ids.extend(encoding.ids)
        ids.append(end_id)
        if len(ids) >= need:
            break
    return torch.tensor(ids, dtype=torch.int64)
