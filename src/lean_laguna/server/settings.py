"""What a server is told at start, and nothing that a request can change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

SpecDecodeMetrics = Literal["none", "summary", "detailed"]
UnknownFields = Literal["refuse", "ignore"]


@dataclass(frozen=True)
class ServerConfig:
    """Limits and habits of the HTTP side; the engine has a configuration of its own.

    Attributes:
        served_model_names: Names a request may use for the model; the first one is reported.
        api_keys: Keys of which a request must bring one; none means that no key is asked for.
        allowed_origins: Origins that browsers may call from; none leaves CORS off.
        max_request_bytes: Longest request body.
        max_queued_seqs: Completions that may wait beside those that run; more are answered 429.
        shutdown_timeout_s: Time that running requests get to finish when the server is told to stop.
        enable_admin: Serve the endpoints that change the server: weights, pause, resume.
        unknown_fields: What to do with a body field that no endpoint knows.
        spec_decode_metrics: Whether responses carry the numbers of their own speculation.
        default_chat_template_kwargs: Template arguments where a request gives none; over the checkpoint's.
        override_generation_config: Sampling defaults over the checkpoint's.
        reasoning_parser: Name of the parser for thinking text, ``auto`` or ``none``.
        tool_call_parser: The same for tool calls.
    """

    served_model_names: tuple[str, ...] = ("nano",)
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_request_bytes: int = 32 << 20
    max_queued_seqs: int = 256
    shutdown_timeout_s: float = 30.0
    enable_admin: bool = False
    unknown_fields: UnknownFields = "refuse"
    spec_decode_metrics: SpecDecodeMetrics = "summary"
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    override_generation_config: Mapping[str, Any] = field(default_factory=dict)
    reasoning_parser: str = "auto"
    tool_call_parser: str = "auto"
