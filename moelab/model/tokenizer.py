"""Text to token ids and back, by the checkpoint's own `tokenizer.json`."""

from __future__ import annotations

from pathlib import Path

import tokenizers

from moelab.config import MoelabError


class Tokenizer:
    """A checkpoint's tokenizer; begins every prompt with the model's beginning-of-sequence id."""

    def __init__(self, folder: str | Path, bos_token_id: int):
        file = Path(folder) / "tokenizer.json"
        if not file.exists():
            raise MoelabError(f"{file}: no such file; give the folder of a whole checkpoint")
        self._inner = tokenizers.Tokenizer.from_file(str(file))
        self._bos = bos_token_id

    def encode(self, text: str) -> list[int]:
        return [self._bos, *self._inner.encode(text, add_special_tokens=False).ids]

    def decode(self, ids: list[int]) -> str:
        return self._inner.decode(ids, skip_special_tokens=True)


class TextStream:
    """Turns tokens into text as they come, holding back what is not yet a whole character."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self._ids, self._done = tokenizer, [], 0

    def add(self, token: int) -> str:
        """The characters that `token` completes."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        whole = len(text.rstrip("\ufffd"))
        piece, self._done = text[self._done : whole], max(self._done, whole)
        return piece

    def finish(self) -> str:
        """What is left, a broken character included."""
        text = self._tokenizer.decode(self._ids)
        piece, self._done = text[self._done :], len(text)
        return piece
