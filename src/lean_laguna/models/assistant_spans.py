"""Which tokens of a rendered conversation the assistant said: what training may learn from.

Read off the template's own ``{% generation %}`` markers; for a template without them, off what it renders
with and without each answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from lean_laguna.core.errors import DataError
from lean_laguna.models.chat_template import ChatTemplate, template_environment
from lean_laguna.models.tokenizer import Tokenizer

_START, _END = "\x00(", "\x00)"  # no text that a tokenizer was made for holds a null character


def tokens_with_mask(
    template: ChatTemplate, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **kwargs: Any
) -> tuple[list[int], list[bool]]:
    """Render and tokenise a conversation, and mark the assistant's tokens.

    Args:
        template: The target's.
        tokenizer: The target's.
        messages: A whole conversation.
        **kwargs: The template's switches, such as ``enable_thinking``.

    Returns:
        Token ids, and for each whether the assistant said it: thinking and end of turn count, tags before
        do not.

    Raises:
        DataError: Text with null characters, or a conversation without an answer.
    """
    if any("\x00" in str(value) for message in messages for value in message.values()):
        raise DataError("a message holds a null character")
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError("the conversation holds no answer of the assistant")
    text, spans = _marked(template, messages, kwargs)
    if not spans:
        text, spans = _by_difference(template, messages, kwargs)
    ids, places = tokenizer.encode_with_offsets(text)
    mask = [any(a <= start and end <= b for a, b in spans) for start, end in places]
    return ids, mask


def _marked(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]
) -> tuple[str, list[tuple[int, int]]]:
    """Render with the markers left in, and take them out again."""
    marked = ChatTemplate(
        template.source,
        special_tokens=template.special_tokens,
        default_kwargs=template.default_kwargs,
        environment=template_environment(_Marking),
    ).render(messages, add_generation_prompt=False, **kwargs)
    text, spans = "", []
    for piece in marked.split(_START):
        inside, end, after = piece.partition(_END)
        if end:
            spans.append((len(text), len(text) + len(inside)))
        text += inside + after
    return text, spans


def _by_difference(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]
) -> tuple[str, list[tuple[int, int]]]:
    """Take as said what a render up to and with an answer has more than one that only asks for it."""
    text = template.render(messages, add_generation_prompt=False, **kwargs)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked = template.render(messages[:i], add_generation_prompt=True, **kwargs)
        answered = template.render(messages[: i + 1], add_generation_prompt=False, **kwargs)
        if not answered.startswith(asked) or not text.startswith(answered):
            raise DataError(
                "the chat template has no {% generation %} markers, and renders an answer otherwise than it "
                "asks for it; which tokens are the assistant's cannot be told"
            )
        spans.append((len(asked), len(answered)))
    return text, spans


class _Marking(jinja2.ext.Extension):
    """Renders ``{% generation %}`` blocks between marks."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Return the block's content as a scope of its own, between marks."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        before, after = (jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)]) for mark in (_START, _END))
        return jinja2.nodes.Scope([before, *body, after]).set_lineno(line)
