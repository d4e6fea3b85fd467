"""A conversation as a request to the engine, for chats and responses alike."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from typing import Any

from anabranch.llm.grammar.structured_outputs import StructuredOutputs
from anabranch.llm.sampling.params import SamplingParams
from anabranch.llm.server.answer_forms import MessageWriter
from anabranch.llm.server.answer_pieces import BEGIN, END
from anabranch.llm.server.chat_models import ChatRequest, Message
from anabranch.llm.server.errors import blaming_the_request, refused
from anabranch.llm.server.service import Service
from anabranch.llm.server.tool_grammar import (
    Thinking,
    call_grammar,
    channel_prelude,
    offer_grammar,
    reasoning_prelude,
)
from anabranch.llm.server.tool_models import FunctionTool, NamedChoice, Tool

_TAIL = 8  # tokens of a prompt in which reasoning may be opened
_TOOLS_PROMPT = (
    "You may call these functions; their arguments are JSON:\n{tools}\n\n"
    "To call one, answer with {call}"
)


class ChatJob:
    """The prompt, the sampling parameters and the writers of the answers."""

    def __init__(self, service: Service, body: ChatRequest) -> None:
        self._service, self._body, self._forms = service, body, service.forms
        self.tools = _offered(body)
        self._opened = False
        self.prompt: list[int] = []
        self.max_tokens = body.max_completion_tokens or body.max_tokens
        texts = [text for message in body.messages for text in message.all_texts]
        texts += [json.dumps(tool.for_template()) for tool in self.tools]
        service.encoder.refuse_by_bytes(texts, "messages")
        self.num_chars = sum(map(len, texts))
        _refuse_variables(body, service)
        with blaming_the_request():
            self.params = self._parameters(body.rules())

    @property
    def parses(self) -> bool:
        return bool(self.tools) or self._forms.always_parsed

    def writer(self) -> MessageWriter:
        """A writer for one answer; to be called after `encode`."""
        parser = None
        if self.parses:
            parser = self._forms.parser(with_tools=bool(self.tools), reasoning_opened=self._opened)
        return MessageWriter(parser, self._shown)

    def _shown(self, text: str) -> str:
        """The text without special tokens, which were decoded only to find marks."""
        if self._body.skip_special_tokens is False or self.params.skip_special_tokens:
            return text
        for special in self._forms.special:
            text = text.replace(special, "")
        return text

    def encode(self) -> list[int]:
        """Tokenize the conversation; choose the grammar, which may depend on the prompt's end."""
        encoder, body = self._service.encoder, self._body
        continues = bool(body.continue_final_message)
        variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
        if self.tools and self._forms.template_has_tools:
            variables["tools"] = [tool.for_template() for tool in self.tools]
        if body.reasoning_effort is not None:
            variables["reasoning_effort"] = body.reasoning_effort
        if continues:
            variables["continue_final_message"] = True
        ids = encoder.chat(
            self._messages(),
            generation_prompt=body.add_generation_prompt is not False and not continues,
            unlimited=body.truncate_prompt_tokens is not None,
            **variables,
        )
        self.prompt = encoder.fitted(
            ids, truncate=body.truncate_prompt_tokens, max_tokens=self.max_tokens
        )
        self._opened = self._forms.thinks and self._tail().rstrip().endswith(BEGIN)
        self._constrain()
        return self.prompt

    def _parameters(self, rules: dict[str, Any]) -> SamplingParams:
        body = self._body
        options: dict[str, Any] = {"max_tokens": self.max_tokens, "logprobs": body.num_top_logprobs}
        defaults = self._service.engine.info.sampling_defaults
        params = body.sampling_params(defaults, **options, **rules)
        if self.parses and self._forms.needs_special(with_tools=bool(self.tools)):
            params = replace(params, skip_special_tokens=False)
        return params

    def _messages(self) -> list[Message]:
        """The messages; a system message describes tools that the template has no place for."""
        messages = self._body.messages
        if not self.tools or self._forms.template_has_tools:
            return messages
        listed = "\n".join(json.dumps(tool.for_template()["function"]) for tool in self.tools)
        form, key = self._forms.tools, self._forms.tools.arguments
        call = f'{form.opens[0]}{{"name": NAME, "{key}": ARGUMENTS}}{form.closes}'
        text = _TOOLS_PROMPT.format(tools=listed, call=call)
        if messages[0].role in ("system", "developer"):
            text = "".join(messages[0].texts) + "\n\n" + text
            messages = messages[1:]
        return [Message(role="system", content=text), *messages]

    def _constrain(self) -> None:
        """Add the grammar of calls, or of reasoning before structured text, to the parameters."""
        required, form = _required(self._body, self.tools), self.params.structured_outputs
        offered = [] if required or form else _strictly_offered(self.tools)
        if not (required or offered or (form is not None and self._forms.always_parsed)):
            return
        texts, written = self._forms.texts, self._forms.tools
        assert texts is not None
        parallel = self._body.parallel_tool_calls is not False
        # reasoning may come before the answer, unless the prompt has ended it already
        thinks = self._forms.thinks and END not in self._tail()
        prelude = reasoning_prelude(texts, opened=self._opened) if thinks else None
        with blaming_the_request():
            if required:
                options: Any = {"parallel": parallel, "prelude": prelude}
                form = StructuredOutputs(grammar=call_grammar(written, required, texts, **options))
            elif offered:
                thinking = Thinking(self._opened) if thinks else None
                options = {"parallel": parallel, "thinking": thinking}
                form = StructuredOutputs(grammar=offer_grammar(written, offered, texts, **options))
            elif form is not None:
                prelude = channel_prelude(texts) if self._forms.channels else prelude
                form = replace(form, prelude=prelude)
            self.params = replace(self.params, structured_outputs=form)

    def _tail(self) -> str:
        """The end of the prompt, in which reasoning may be opened."""
        return self._service.texts.decode(self.prompt[-_TAIL:])


def _offered(body: ChatRequest) -> list[Tool]:
    choice = body.tool_choice
    if not body.tools:
        if choice == "required" or isinstance(choice, NamedChoice):
            raise refused("tool_choice", "tool_choice needs tools")
        return []
    if isinstance(choice, NamedChoice):
        names = [tool.function.name for tool in body.tools]
        if choice.function.name not in names:
            named = f"tool_choice names {choice.function.name!r}"
            raise refused("tool_choice", f"{named}, the tools are {', '.join(names)}")
    return [] if choice == "none" else body.tools


def _required(body: ChatRequest, tools: list[Tool]) -> list[FunctionTool]:
    """Functions of which one must be called; empty where the model decides."""
    choice = body.tool_choice
    functions = [tool.function for tool in tools]
    if isinstance(choice, NamedChoice):
        return [each for each in functions if each.name == choice.function.name]
    return functions if choice == "required" else []


def _strictly_offered(tools: list[Tool]) -> list[FunctionTool]:
    """All functions if one is strict: its calls must match its schema. Empty otherwise."""
    functions = [tool.function for tool in tools]
    return functions if any(each.strict for each in functions) else []


def _refuse_variables(body: ChatRequest, service: Service) -> None:
    """Refuse variables that are options of the tokenizer, and contradictions."""
    tokenizer = service.engine.info.tokenizer
    taken = set[str]()
    if tokenizer is not None:
        taken = set(inspect.signature(tokenizer.apply_chat_template).parameters)
    for name in body.chat_template_kwargs or {}:
        if name in taken or not name.isidentifier():
            message = f"chat_template_kwargs must not hold {name[:40]!r}"
            raise refused("chat_template_kwargs", message)
    if not body.continue_final_message:
        return
    if (last := body.messages[-1].role) != "assistant":
        message = "continue_final_message needs a last message of the assistant, got one of the "
        raise refused("continue_final_message", message + last)
    if "add_generation_prompt" in body.model_fields_set and body.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt exclude each other"
        raise refused("continue_final_message", message)
