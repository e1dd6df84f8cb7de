"""The nano tokenizer: byte-level BPE whose special ids follow Laguna's, and the files that go with it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from lean_laguna.core.files import atomic_write_json, atomic_write_text

# Ids and spellings as in the Laguna family (formats 1.3); all other ids below 32 are reserved.
NUM_RESERVED = 32
EOS_ID, PAD_ID, MASK_ID, THINK_ID, END_THINK_ID = 2, 9, 12, 18, 19
ASSISTANT_ID, END_ASSISTANT_ID, TOOL_CALL_ID, END_TOOL_CALL_ID = 23, 24, 25, 26
_SPELLING = {
    EOS_ID: "〈|EOS|〉",
    PAD_ID: "<|pad|>",
    MASK_ID: "<|mask|>",
    THINK_ID: "<think>",
    END_THINK_ID: "</think>",
    ASSISTANT_ID: "<assistant>",
    END_ASSISTANT_ID: "</assistant>",
    TOOL_CALL_ID: "<tool_call>",
    END_TOOL_CALL_ID: "</tool_call>",
}
# Parsers and readers must see these in the text, so decoding never skips them.
_VISIBLE = frozenset({THINK_ID, END_THINK_ID, TOOL_CALL_ID, END_TOOL_CALL_ID})

# A line break takes the indentation of the next line with it; a word takes one blank or sign before it.
SPLIT_PATTERN = (
    r"\s*\n[ \t]*|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[ \t]+(?!\S)|[ \t]+(?=[ \t]\S)|\s+"
)

SYSTEM_PROMPT = "You write Python."
CHAT_TEMPLATE = """\
{#- laguna_glm_thinking_v8 layout, in our own words: turns without blank lines, thinking off is a bare
</think> -#} {%- set thinking = enable_thinking | default(false) -%}
{{- "〈|EOS|〉" -}}
{%- if messages and messages[0].role == "system" -%}
{%- set system = messages[0].content -%}{%- set turns = messages[1:] -%}
{%- else -%}
{%- set system = "%SYSTEM%" -%}{%- set turns = messages -%}
{%- endif -%}
{%- if system or tools -%}
{{- "<system>" + system -}}
{%- if tools -%}
{{- ("\\n\\n" if system else "") + "### Tools\\n\\nYou may call functions to assist with the user query.\\n"
    + "All available function signatures are listed below:\\n<available_tools>\\n" -}}
{%- for tool in tools -%}{{- tool | tojson + "\\n" -}}{%- endfor -%}
{{- "</available_tools>" -}}
{%- endif -%}
{{- "</system>\\n" -}}
{%- endif -%}
{%- for message in turns -%}
{%- if message.role == "user" -%}
{{- "<user>" + message.content + "</user>\\n" -}}
{%- elif message.role == "tool" -%}
{{- "<tool_response>" + message.content + "</tool_response>\\n" -}}
{%- elif message.role == "assistant" -%}
{{- "<assistant>" -}}
{%- generation -%}
{{- ("<think>" + (message.reasoning_content or "") if thinking else "") + "</think>" -}}
{{- message.content or "" -}}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{{- "<tool_call>" + function.name -}}
{%- for key, value in function.arguments.items() -%}
{{- "<arg_key>" + key + "</arg_key><arg_value>" -}}
{{- value if value is string else value | tojson(ensure_ascii=False) -}}
{{- "</arg_value>" -}}
{%- endfor -%}
{{- "</tool_call>" -}}
{%- endfor -%}
{{- "</assistant>\\n" -}}
{%- endgeneration -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- "<assistant>" + ("<think>" if thinking else "</think>") -}}
{%- endif -%}
""".replace("%SYSTEM%", SYSTEM_PROMPT)


def chat_document(instruction: str, code: str) -> str:
    """Return one chat-format training text, without the leading EOS; equal to the template's rendering."""
    return (
        f"<system>{SYSTEM_PROMPT}</system>\n<user>{instruction}</user>\n"
        f"<assistant></think>```python\n{code}\n```</assistant>\n"
    )


def special_tokens() -> list[AddedToken]:
    """Return the 32 reserved tokens in id order."""
    return [
        AddedToken(_SPELLING.get(i, f"<|reserved_{i}|>"), special=i not in _VISIBLE, normalized=False)
        for i in range(NUM_RESERVED)
    ]


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE of exactly ``vocab_size`` ids, the first 32 reserved.

    Every byte is a token, so any text encodes without loss and nothing is unknown.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[token.content for token in special_tokens()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=48,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([token for i, token in enumerate(special_tokens()) if i in _VISIBLE])
    document = json.loads(tokenizer.to_str())
    for entry in document["added_tokens"]:
        entry["special"] = entry["id"] not in _VISIBLE
    return Tokenizer.from_str(json.dumps(document))


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_position_embeddings: int) -> None:
    """Write tokenizer.json, tokenizer_config.json, generation_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPELLING[EOS_ID],
        "eos_token": _SPELLING[EOS_ID],
        "pad_token": _SPELLING[PAD_ID],
        "mask_token": _SPELLING[MASK_ID],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_position_embeddings,
    }
    generation = {
        "bos_token_id": EOS_ID,
        "eos_token_id": [EOS_ID, END_ASSISTANT_ID],
        "pad_token_id": PAD_ID,
        "do_sample": True,
        "temperature": 0.8,
        "top_p": 1.0,
        "top_k": 20,
        "default_chat_template_kwargs": {"enable_thinking": False},
    }
    atomic_write_json(folder / "tokenizer_config.json", config)
    atomic_write_json(folder / "generation_config.json", generation)
    atomic_write_text(folder / "chat_template.jinja", CHAT_TEMPLATE)


def chars_per_token(tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    """Return the characters each id adds to the text, [V]; special ids add none.

    A character is counted at its first byte, so the sum over any whole text is its exact length.
    """
    byte_of = _byte_of_symbol()
    counts = np.zeros(tokenizer.get_vocab_size(), np.int64)
    for symbol, index in tokenizer.get_vocab().items():
        if index >= NUM_RESERVED:
            counts[index] = sum((byte_of[c] & 0xC0) != 0x80 for c in symbol)
    return counts


def _byte_of_symbol() -> dict[str, int]:
    """The byte-level alphabet: printable bytes stand for themselves, others for code points from 256 up."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    table = {chr(b): b for b in printable}
    others = [b for b in range(256) if b not in set(printable)]
    table.update({chr(256 + i): b for i, b in enumerate(others)})
    return table
