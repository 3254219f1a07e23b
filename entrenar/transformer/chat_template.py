"""Render a model's chat template the way transformers renders it.

Templates come with the weights, from strangers: they run in jinja2's immutable sandbox and see
nothing but plain data.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from entrenar import runtime
from entrenar.errors import ConfigError, DataError

__all__ = ["render", "select_template"]


def select_template(value: object, where: str) -> str | None:
    """Return the template of a ``chat_template`` entry: text, or a list of named ones.

    Raises:
        ConfigError: It is neither, or the list has no default and several to choose from.
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(v, Mapping) and "template" in v for v in value):
        named = {str(v.get("name", "default")): str(v["template"]) for v in value}
        if "default" in named or len(named) == 1:
            return named.get("default") or next(iter(named.values()))
        raise ConfigError(
            f"{where}: chat_template has {', '.join(sorted(named))} and no default",
            "put the one you want into chat_template.jinja",
        )
    raise ConfigError(f"{where}: chat_template is a {type(value).__name__}, wanted text", "")


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = False,
    **variables: Any,
) -> str:
    """Return the text of a conversation.

    Args:
        template: jinja2 source.
        messages: Objects with ``role`` and ``content``; other keys reach the template as they are,
            keys that hold None do not.
        add_generation_prompt: End with the opening of the assistant's turn.
        **variables: Further names the template may use, such as ``bos_token``.

    Raises:
        DataError: The template refuses the conversation, or fails on it.
        ConfigError: The template is not valid jinja2.
        MissingExtraError: jinja2 is not installed.
    """
    jinja2 = runtime.require("jinja2", extra="train", feature="rendering a chat template")
    plain = [{k: _plain(v) for k, v in message.items() if v is not None} for message in messages]
    try:
        compiled = _compiled(template)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"chat template, line {error.lineno}: {error.message}", "") from error
    try:
        return compiled.render(
            messages=plain,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
    except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
        raise DataError(
            f"the chat template does not accept this conversation: {error}",
            "check the roles, their order, and that content is text",
        ) from error


def _plain(value: Any) -> Any:
    """Rebuild a value of JSON types alone, so that a template meets no object with methods."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return f"<{type(value).__name__}>"


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> Any:
    return _environment().from_string(template)


@functools.cache
def _environment() -> Any:
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class GenerationBlock(jinja2.ext.Extension):
        """``{% generation %}``, which marks the assistant's text, renders as its content."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationBlock, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
