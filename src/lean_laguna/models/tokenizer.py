"""Text to token ids and back, from a checkpoint's ``tokenizer.json``.

Two rules of its own. Nothing is prepended: Laguna's chat template writes the start token itself. And text
never
holds half a character: bytes of an unfinished character at the end are left out, by ``decode`` and by the
incremental detokenizer alike, so streamed text and whole text are the same. Bytes that no continuation could
turn into a character become U+FFFD, as everywhere. (Tokenizers that are not byte-level, which no Laguna has,
decode as the ``tokenizers`` package decodes them.)

Source: the byte alphabet of byte-level BPE is GPT-2's; the decoding rule is that of the ``tokenizers``
    package.
"""

from __future__ import annotations

import codecs
import functools
import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from lean_laguna.core.errors import CheckpointError, RequestError
from lean_laguna.core.files import is_there
from lean_laguna.models.generation_config import GENERATION_CONFIG_FILE, read_eos_token_ids, read_json_object

ASSISTANT_END = "</assistant>"
_LONG_TEXT = 10_000
"""Characters from which on a text is encoded with Python's other threads running (which a short one is not
worth)."""


class Tokenizer:
    """A checkpoint's tokenizer; immutable once made.

    Attributes:
        eos_token_ids: Every id that ends a turn: of ``generation_config.json``, ``config.json``, and the
            assistant-end token where the vocabulary has it (some checkpoints do not list it).
        special_token_ids: Ids left out of text by ``skip_special_tokens``.
        vocab_size: One more than the highest id.
        is_byte_level: True where each token is a run of bytes; then decoding is exact at any split.
    """

    def __init__(self, backend: tokenizers.Tokenizer, eos_token_ids: Sequence[int] = ()):
        backend.no_truncation()  # a tokenizer.json may carry the limits of the training run
        backend.no_padding()
        self._backend = backend
        vocab = backend.get_vocab(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.is_byte_level = _is_byte_level(backend)
        turn_end = backend.token_to_id(ASSISTANT_END)
        ids = [*eos_token_ids, *([] if turn_end is None else [turn_end])]
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(ids))

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """Read ``tokenizer.json`` and the stop ids of a checkpoint folder.

        Raises:
            CheckpointError: The file is missing or damaged, or a stop id is outside the vocabulary.
        """
        file = Path(path) / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(
                f"{file}: no such file; a checkpoint folder must hold the tokenizer as tokenizer.json"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises plain Exception
            raise CheckpointError(f"{file}: not a tokenizer of the 'tokenizers' package: {error}") from None
        eos: list[int] = []
        for name in (GENERATION_CONFIG_FILE, "config.json"):
            source = Path(path) / name
            if not is_there(source):
                continue
            for token_id in read_eos_token_ids(read_json_object(source), str(source)):
                if backend.id_to_token(token_id) is None:
                    raise CheckpointError(
                        f"{source}: 'eos_token_id' {token_id} is not a token of {file}, "
                        f"which has {backend.get_vocab_size()} tokens"
                    )
                eos.append(token_id)
        return cls(backend, eos)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of ``text``; special tokens written out in the text become their ids.

        Args:
            text: Any Unicode text.
            add_special_tokens: Also apply the file's own template (start and end tokens).

        Raises:
            RequestError: The text holds an unpaired surrogate, which no encoding can carry.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text holds an unpaired surrogate, {text[error.start]!r}, at character {error.start}",
                param="prompt",
            ) from None
        # The package's ``encode`` holds Python's lock till it is done; its batches let go of it.
        if len(text) < _LONG_TEXT:
            found = self._backend.encode(text, add_special_tokens=add_special_tokens)
        else:
            (found,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = found.ids
        return ids

    def fewest_tokens(self, text: str) -> int:
        """Return a number that the tokens of ``text`` cannot be fewer than, without encoding it.

        It is the text's bytes over those of the longest token, and 0 where a token may stand for more than it
        spells.
        """
        return -(-len(text.encode("utf-8", "surrogatepass")) // self._longest) if self._longest else 0

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the token ids of ``text``, and for each the characters it stands for, as start and end."""
        found = self._backend.encode(text, add_special_tokens=False)
        return list(found.ids), [(int(start), int(end)) for start, end in found.offsets]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``, without an unfinished character at the end."""
        detokenizer = IncrementalDetokenizer(self, skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.flush()

    def difference_from(self, other: Tokenizer) -> str | None:
        """Name an id that stands for another token in ``other``; None where all stand for the same."""
        own, theirs = ({i: t for t, i in one._backend.get_vocab().items()} for one in (self, other))
        wrong = next((i for i in sorted(own | theirs) if own.get(i) != theirs.get(i)), None)
        return None if wrong is None else f"{wrong} is {own.get(wrong)!r}, there {theirs.get(wrong)!r}"

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token given as the vocabulary spells it, or None."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def id_to_token(self, token_id: int) -> str | None:
        """Return a token as the vocabulary spells it, or None."""
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for; empty for an id without a token."""
        if not self.is_byte_level:
            return self.backend_decode([token_id], skip_special_tokens=False).encode("utf-8")
        table = self._byte_table
        return table[token_id] if 0 <= token_id < len(table) else b""

    def token_text(self, token_id: int) -> str:
        """Return one token as text for display, with U+FFFD for bytes that are no characters alone."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def backend_decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return what the ``tokenizers`` package makes of ``ids``, unfinished characters as U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    @functools.cached_property
    def _longest(self) -> int:
        """Bytes of the longest token; 0 where text can vanish: normalised, dropped, or swallowed as space."""
        pre = self._backend.pre_tokenizer
        is_dropping = pre is not None and b'"Removed"' in pre.__getstate__()
        added = self._backend.get_added_tokens_decoder().values()
        is_swallowing = any(token.lstrip or token.rstrip for token in added)
        if not self.is_byte_level or self._backend.normalizer is not None or is_dropping or is_swallowing:
            return 0
        return max(map(len, self._byte_table))

    @functools.cached_property
    def _byte_table(self) -> list[bytes]:
        table = [b""] * self.vocab_size
        alphabet = _byte_alphabet()
        for token, token_id in self._backend.get_vocab(with_added_tokens=True).items():
            if token_id in self._added:  # added tokens are plain text, not spelled in the byte alphabet
                table[token_id] = self._added[token_id].encode("utf-8")
            else:
                table[token_id] = _spelled_bytes(token, alphabet)
        return table


class IncrementalDetokenizer:
    """Turns token ids into text as they come; owned by one completion.

    What all ``push`` calls returned, and then ``flush``, is the text of ``Tokenizer.decode``, however the ids
    were split into calls. A call costs time in proportion to its own ids, not to those before.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._window: list[int] = []  # used only where tokens are not runs of bytes
        self._num_shown = 0

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that became certain with ``ids``; never part of a character."""
        if not self._tokenizer.is_byte_level:
            return "".join(self._push_windowed(i) for i in ids)
        token_bytes = self._tokenizer.token_bytes
        return self._utf8.decode(b"".join(token_bytes(i) for i in ids if i not in self._skipped))

    def flush(self) -> str:
        """Return what was held back and is text, and start anew; an unfinished character is dropped."""
        if self._tokenizer.is_byte_level:
            held = self._utf8.getstate()[0]
            self._utf8.reset()
            # Python holds back the first two bytes of a surrogate, which nothing can complete: show them.
            return held.decode("utf-8", "replace") if held[:2] >= b"\xed\xa0" and held[:1] == b"\xed" else ""
        text = self._decode_window(self._window)[len(self._decode_window(self._window[: self._num_shown])) :]
        self._window, self._num_shown = [], 0
        return text

    def _push_windowed(self, token_id: int) -> str:
        """Decode a short window with and without the new token and return the difference.

        The window starts at the last place where text was complete, since a decoder may join neighbours
        (spaces of the first word, byte fallback).
        """
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        before = self._decode_window(self._window[: self._num_shown])
        after = self._decode_window(self._window)
        if after.endswith("\ufffd") or len(after) <= len(before):
            return ""
        self._window = self._window[self._num_shown :]
        self._num_shown = len(self._window)
        return after[len(before) :]

    def _decode_window(self, ids: Sequence[int]) -> str:
        return self._tokenizer.backend_decode(ids, skip_special_tokens=False)


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    if backend.decoder is None:
        return False
    decoder = json.loads(
        backend.decoder.__getstate__()
    )  # its JSON form; the whole tokenizer's would be megabytes
    parts = decoder.get("decoders") if decoder.get("type") == "Sequence" else [decoder]
    return [part.get("type") for part in parts or []] == ["ByteLevel"]


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's map from the character that spells a byte to the byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet


def _spelled_bytes(token: str, alphabet: dict[str, int]) -> bytes:
    if all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return token.encode("utf-8")
