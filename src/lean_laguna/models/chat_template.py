"""Messages to prompt text, by the chat template that a checkpoint ships.

The template is a program written by others: it runs in jinja2's sandbox, with the names and filters that
Hugging Face gives it. Whether the model starts inside its thinking is read off the rendered prompt, never
from a table of model names, since the default differs between checkpoints of one family and between revisions
of one.

Source: transformers.utils.chat_template_utils (environment, ``tojson``, ``{% generation %}``).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from lean_laguna.core.errors import CheckpointError, RequestError
from lean_laguna.core.files import is_there
from lean_laguna.models.generation_config import GenerationConfig, read_json_object
from lean_laguna.models.tokenizer import ASSISTANT_END, Tokenizer

ASSISTANT_START = "<assistant>"
THINK_START, THINK_END = "<think>", "</think>"
TEMPLATE_FILE = "chat_template.jinja"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def starts_in_thinking(rendered: str) -> bool:
    """Return whether text generated after this prompt begins inside the model's thinking.

    Only what follows the last assistant tag counts, so that a user who writes about think tags changes
    nothing.
    """
    turn = rendered.rpartition(ASSISTANT_START)[2] if ASSISTANT_START in rendered else ""
    if not turn:
        return rendered.rstrip().endswith(THINK_START)
    return turn.rfind(THINK_START) > turn.rfind(THINK_END)


class ChatTemplate:
    """A compiled chat template; immutable.

    Attributes:
        source: The template's text.
        special_tokens: ``bos_token`` and so on, where the checkpoint names them.
        default_kwargs: Arguments that the checkpoint sets (``default_chat_template_kwargs``); a call's own
            win.
    """

    starts_in_thinking = staticmethod(starts_in_thinking)

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        default_kwargs: Mapping[str, Any] | None = None,
        where: str = "chat template",
        environment: jinja2.Environment | None = None,
    ):
        """Compile the template.

        Args:
            source: Jinja text.
            special_tokens: ``bos_token`` and so on, as the template may name them.
            default_kwargs: Arguments used where a call gives none.
            where: The file, for messages.
            environment: From :func:`template_environment`; None for the usual one.

        Raises:
            CheckpointError: The template does not compile; names the line.
        """
        self.source = source
        self.default_kwargs = dict(default_kwargs or {})
        self.special_tokens = dict(special_tokens or {})
        try:
            self._template = (environment or template_environment()).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"{where}: not a valid template, line {error.lineno}: {error.message}"
            ) from None

    @classmethod
    def from_dir(cls, path: str | Path) -> ChatTemplate:
        """Read a checkpoint's template: ``chat_template.jinja``, else the one in ``tokenizer_config.json``.

        Raises:
            CheckpointError: There is none, it cannot be read, or it does not compile.
        """
        folder = Path(path)
        config_file = folder / "tokenizer_config.json"
        config = read_json_object(config_file) if is_there(config_file) else {}
        file = folder / TEMPLATE_FILE
        if is_there(file):
            source, where = _read_text(file), str(file)
        else:
            source, where = _embedded_template(config, config_file), f"{config_file}, 'chat_template'"
        return cls(
            source,
            special_tokens=_special_tokens(config),
            default_kwargs=GenerationConfig.from_dir(folder).default_chat_template_kwargs,
            where=where,
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Return the prompt for a conversation.

        Args:
            messages: Each with ``role`` and ``content``, and what else the template reads (``tool_calls``,
                ``reasoning`` ...).
            tools: JSON schemas of the functions that the model may call.
            add_generation_prompt: Open the assistant's turn at the end.
            **kwargs: The template's own switches, such as ``enable_thinking``.

        Raises:
            RequestError: The template refuses the conversation, or cannot render it.
        """
        if (
            not isinstance(messages, Sequence)
            or isinstance(messages, str)
            or not all(isinstance(m, Mapping) and "role" in m for m in messages)
        ):
            raise RequestError("messages must be a list of objects with a 'role'", param="messages")
        if not messages:
            raise RequestError("messages must hold at least one message", param="messages")
        values: dict[str, Any] = {**self.special_tokens, **self.default_kwargs, **kwargs}
        values.update(messages=list(messages), tools=tools or None, documents=None)
        values["add_generation_prompt"] = add_generation_prompt
        try:
            return self._template.render(values)
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template refused the messages: {error}", param="messages") from None
        except (
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            IndexError,
            ArithmeticError,
            RecursionError,
        ) as error:
            # What a template's own expressions raise on messages of a shape it did not expect.
            raise RequestError(
                f"the chat template failed on the messages: {error!r}", param="messages"
            ) from None


def check_role_tokens(template: ChatTemplate, tokenizer: Tokenizer, where: str) -> None:
    """Refuse a template whose end-of-turn tag is not one token, since generation could then never stop on it.

    Args:
        template: The checkpoint's chat template.
        tokenizer: The checkpoint's tokenizer.
        where: The checkpoint, for messages.

    Raises:
        CheckpointError: Names the tag.
    """
    if ASSISTANT_END in template.source and tokenizer.token_to_id(ASSISTANT_END) is None:
        raise CheckpointError(
            f"{where}: the chat template ends turns with {ASSISTANT_END}, which is not a token of "
            "tokenizer.json; the tokenizer or the template is from another checkpoint"
        )


class _GenerationBlocks(jinja2.ext.Extension):
    """Renders what ``{% generation %} ... {% endgeneration %}``, a marker for training masks, holds."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Return the block's content as a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def template_environment(
    generation: type[jinja2.ext.Extension] = _GenerationBlocks,
) -> jinja2.Environment:
    """Return the sandbox that templates run in.

    Args:
        generation: What renders ``{% generation %}`` blocks.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes <, > and & for HTML, which a model has never seen in its training text.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")  # an editor's mark at the start is no part of a prompt
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: cannot be read as UTF-8 text: {error}") from None


def _embedded_template(config: Mapping[str, Any], config_file: Path) -> str:
    given = config.get("chat_template")
    if isinstance(given, list):  # several, by name
        given = {
            entry.get("name"): entry.get("template") for entry in given if isinstance(entry, Mapping)
        }.get("default")
    if not isinstance(given, str):
        raise CheckpointError(
            f"{config_file.parent}: no chat template; expected {TEMPLATE_FILE}, or a text under "
            f"'chat_template' in {config_file.name}"
        )
    return given


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in SPECIAL_TOKENS:
        token = config.get(name)
        if isinstance(token, Mapping):
            token = token.get("content")
        if isinstance(token, str):
            found[name] = token
    return found
