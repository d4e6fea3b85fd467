"""A conversation as a job for the engine, whatever protocol the answer is written in."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from typing import Any

from anabranch.llm.grammar.structured_outputs import StructuredOutputs
from anabranch.llm.sampling.params import SamplingParams
from anabranch.llm.server.answer_pieces import PieceParser
from anabranch.llm.server.chat_models import ChatRequest, Message
from anabranch.llm.server.errors import ApiError, blaming_the_request
from anabranch.llm.server.offer_grammar import Thinking, offer_grammar
from anabranch.llm.server.reasoning import BEGIN, END
from anabranch.llm.server.service import Service
from anabranch.llm.server.tool_grammar import (
    LarkTexts,
    call_grammar,
    channel_prelude,
    reasoning_prelude,
)
from anabranch.llm.server.tool_models import FunctionTool, NamedChoice, Tool

_TAIL = 8  # tokens of a prompt in which reasoning may be opened
_TOOLS_PROMPT = (
    "You may call these functions; their arguments are JSON:\n{tools}\n\n"
    "To call one, answer with {call}"
)


class ChatJob:
    """Prompt, parameters and the parsers of the answers."""

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
        """Whether answers are taken apart."""
        return bool(self.tools) or self._forms.always_parsed

    def parser(self) -> PieceParser | None:
        """Of one answer; after `encode`."""
        if not self.parses:
            return None
        return self._forms.parser(with_tools=bool(self.tools), reasoning_opened=self._opened)

    def shown(self, text: str) -> str:
        """Without special tokens that were wanted only for their place."""
        if self._body.skip_special_tokens is False or self.params.skip_special_tokens:
            return text
        for special in self._forms.special:
            text = text.replace(special, "")
        return text

    def encode(self) -> list[int]:
        """Tokens of the conversation; decides the grammar, which may depend on the prompt's end."""
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
        if self._forms.thinks:
            tail = self._service.texts.decode(self.prompt[-_TAIL:])
            self._opened = tail.rstrip().endswith(BEGIN)
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
        """With the tools in words, where the template has no place for them."""
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
        """Put the grammar of calls, or reasoning before a form, into the parameters."""
        required, form = _required(self._body, self.tools), self.params.structured_outputs
        offered = [] if required or form else _strictly_offered(self.tools)
        if not (required or offered or (form is not None and self._forms.always_parsed)):
            return
        texts = self._forms.texts
        assert texts is not None
        with blaming_the_request():
            if required:
                form = StructuredOutputs(grammar=self._required_calls(required, texts))
            elif offered:
                form = StructuredOutputs(grammar=self._offered_calls(offered, texts))
            elif form is not None:
                prelude = self._prelude(texts)
                prelude = channel_prelude(texts) if self._forms.channels else prelude
                form = replace(form, prelude=prelude)
            self.params = replace(self.params, structured_outputs=form)

    @property
    def _parallel(self) -> bool:
        return self._body.parallel_tool_calls is not False

    @property
    def _will_think(self) -> bool:
        """Whether reasoning may come before the answer: a prompt may end it already."""
        tail = self._service.texts.decode(self.prompt[-_TAIL:])
        return self._forms.thinks and END not in tail

    def _prelude(self, texts: LarkTexts) -> str | None:
        return reasoning_prelude(texts, opened=self._opened) if self._will_think else None

    def _required_calls(self, functions: list[FunctionTool], texts: LarkTexts) -> str:
        prelude = self._prelude(texts)
        return call_grammar(
            self._forms.tools, functions, texts, parallel=self._parallel, prelude=prelude
        )

    def _offered_calls(self, functions: list[FunctionTool], texts: LarkTexts) -> str:
        thinking = Thinking(self._opened) if self._will_think else None
        return offer_grammar(
            self._forms.tools, functions, texts, parallel=self._parallel, thinking=thinking
        )


def _offered(body: ChatRequest) -> list[Tool]:
    """Tools that the model may call."""
    choice = body.tool_choice
    if not body.tools:
        if choice == "required" or isinstance(choice, NamedChoice):
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        return []
    if isinstance(choice, NamedChoice):
        names = [tool.function.name for tool in body.tools]
        if choice.function.name not in names:
            raise ApiError(
                400,
                f"tool_choice names {choice.function.name!r}, the tools are {', '.join(names)}",
                param="tool_choice",
            )
    return [] if choice == "none" else body.tools


def _required(body: ChatRequest, tools: list[Tool]) -> list[FunctionTool]:
    """Functions one of which must be called; none where the model decides."""
    choice = body.tool_choice
    functions = [tool.function for tool in tools]
    if isinstance(choice, NamedChoice):
        return [each for each in functions if each.name == choice.function.name]
    return functions if choice == "required" else []


def _strictly_offered(tools: list[Tool]) -> list[FunctionTool]:
    """All functions, where the model decides and the calls of one must match their schema."""
    functions = [tool.function for tool in tools]
    return functions if any(each.strict for each in functions) else []


def _refuse_variables(body: ChatRequest, service: Service) -> None:
    """Variables that would change how a template is applied, and contradictions."""
    tokenizer = service.engine.info.tokenizer
    taken = set[str]()
    if tokenizer is not None:
        taken = set(inspect.signature(tokenizer.apply_chat_template).parameters)
    for name in body.chat_template_kwargs or {}:
        if name in taken or not name.isidentifier():
            raise ApiError(
                400,
                f"chat_template_kwargs must not hold {name[:40]!r}",
                param="chat_template_kwargs",
            )
    if body.continue_final_message:
        if body.messages[-1].role != "assistant":
            raise ApiError(
                400,
                f"continue_final_message needs a last message of the assistant, "
                f"got one of the {body.messages[-1].role}",
                param="continue_final_message",
            )
        if "add_generation_prompt" in body.model_fields_set and body.add_generation_prompt:
            raise ApiError(
                400,
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
