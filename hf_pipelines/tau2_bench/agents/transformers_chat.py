"""A chat model on this machine: any causal language model of transformers with a chat template."""

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hf_pipelines.tau2_bench.agents.prefix_cache import PrefixCache, ones
from hf_pipelines.tau2_bench.agents.tool_parsers import parse_output, split_reasoning
from hf_pipelines.tau2_bench.players import ContextWindowExceeded, MalformedOutput

TOOL_PROMPTS = ("template", "json")
JSON_INSTRUCTIONS = (
    "You have these tools, one JSON schema a line:\n<tools>\n{schemas}\n</tools>\n"
    "To call one, answer with nothing but\n"
    '<tool_call>{{"name": "tool", "arguments": {{"argument": "value"}}}}</tool_call>'
)


class TransformersChat:
    """Answers conversations with a model in memory; keeps its keys and values, so that a turn costs only what is new.

    Args:
        model (`PreTrainedModel`): A causal language model.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer, with a chat template.
        max_new_tokens (`int`, defaults to 512): Longest answer.
        temperature (`float`, defaults to 0): Sampling temperature; 0 takes the likeliest token.
        top_p (`float`, defaults to 1): Share of probability to sample from.
        tool_prompt (`str`, defaults to `"template"`): `"json"` puts the schemas into the system text, for a chat
            template that knows no tools.
        use_cache (`bool`, defaults to `True`): Whether keys and values are kept between turns.
        conversations (`int`, defaults to 2): How many conversations are kept.
        context_length (`int`, *optional*): Longest prompt with answer; the model's own where not given.
        name (`str`, *optional*): For reports.
        template_options (`dict`, *optional*): Further variables of the chat template, such as `enable_thinking`.

    Raises:
        ValueError: If there is no chat template, or it knows no tools, or an argument is out of range.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        max_new_tokens: int = 512,
        temperature: float = 0.0,
        top_p: float = 1.0,
        tool_prompt: str = "template",
        use_cache: bool = True,
        conversations: int = 2,
        context_length: int | None = None,
        name: str | None = None,
        template_options: dict[str, Any] | None = None,
    ) -> None:
        if tool_prompt not in TOOL_PROMPTS:
            raise ValueError(f"tool_prompt={tool_prompt!r} is not one of {', '.join(TOOL_PROMPTS)}")
        if max_new_tokens < 1 or temperature < 0 or not 0 < top_p <= 1:
            raise ValueError(
                f"max_new_tokens={max_new_tokens}, temperature={temperature}, top_p={top_p}: need at least 1 token, a "
                "temperature of at least 0 and 0 < top_p ≤ 1"
            )
        self.name = name or getattr(model, "name_or_path", "") or type(model).__name__
        check_template(tokenizer, tool_prompt, self.name)
        self.model, self.tokenizer = model.eval(), tokenizer
        self.max_new_tokens, self.temperature, self.top_p = max_new_tokens, float(temperature), float(top_p)
        self.tool_prompt, self.template_options = tool_prompt, dict(template_options or {})
        self.context_length = context_length or _context_length(model.config)
        self._kept = PrefixCache(model.config, conversations) if use_cache else None
        self._lock = threading.Lock()

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        device: str | None = None,
        dtype: Any = None,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> "TransformersChat":
        """Load model and tokenizer.

        Args:
            model (`str` or `Path`): Folder or Hub id.
            device (`str`, *optional*): Where to put the model.
            dtype (*optional*): Such as `"bfloat16"`; the checkpoint's where not given.
            trust_remote_code (`bool`, defaults to `False`): Whether to run code that the repository brings.
            **options: Further arguments of [`TransformersChat`].
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
        check_template(tokenizer, options.get("tool_prompt", "template"), str(model))  # before the weights are read
        loaded = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype or "auto", trust_remote_code=trust_remote_code
        )
        return cls(loaded.to(device) if device else loaded, tokenizer, name=str(model), **options)

    def describe(self) -> dict[str, Any]:
        """For reports and the configuration's hash."""
        return {
            "kind": "transformers",
            "model": self.name,
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tool_prompt": self.tool_prompt,
            "dtype": str(self.model.dtype),
            **({"template_options": self.template_options} if self.template_options else {}),
        }

    def __call__(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        tool_choice: Any = None,
        seed: int | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Answer a conversation.

        Args:
            messages (`list[dict]`): In OpenAI form.
            tools (`Sequence[dict]`, *optional*): Schemas.
            tool_choice (*optional*): Not enforced on a local model; the instructions ask for it.
            seed (`int`, *optional*): Of the sampling.
            **options: Further arguments of `generate`.

        Raises:
            ContextWindowExceeded: If the prompt does not fit.
        """
        with self._lock, torch.inference_mode():
            prompt = self.encode(messages, tools)
            if self.context_length is not None and len(prompt) >= self.context_length:
                raise ContextWindowExceeded(
                    f"the prompt has {len(prompt)} tokens, the context of {self.name} holds {self.context_length}"
                )
            produced, finished = self._generate(prompt, seed, options)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(produced)}
        answer = self._parse(produced, prompt, tools)
        return {**answer, "usage": usage, "finish_reason": "stop" if finished else "length"}

    # ------------------------------------------------------------------------------------------------------ tokens

    def encode(self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None) -> list[int]:
        """The tokens of a conversation, ready for the answer; control tokens that somebody typed are plain text."""
        options: dict[str, Any] = {"tools": list(tools) if tools else None}
        if self.tool_prompt == "json":
            messages, options = as_plain_chat(messages, tools), {}
        encoded = self.tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            sanitize_control_tokens=True,
            **options,
            **self.template_options,
        )
        ids = encoded["input_ids"]
        return list(ids[0] if ids and isinstance(ids[0], list) else ids)

    def _generate(self, prompt: list[int], seed: int | None, options: dict[str, Any]) -> tuple[list[int], bool]:
        """New tokens, and whether the model ended by itself."""
        from transformers import DynamicCache

        room = self.context_length - len(prompt) if self.context_length is not None else self.max_new_tokens
        cache = self._kept.take(prompt) if self._kept is not None else DynamicCache(config=self.model.config)
        arguments: dict[str, Any] = {"max_new_tokens": min(self.max_new_tokens, room), "do_sample": False}
        if self.temperature > 0:
            arguments.update(do_sample=True, temperature=self.temperature, top_p=self.top_p, top_k=0)
        else:
            arguments.update(temperature=None, top_p=None, top_k=None)
        device = self.model.device
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(0 if seed is None else seed)
            output = self.model.generate(
                torch.tensor([prompt], device=device),
                attention_mask=ones(len(prompt), device),
                cache=cache,
                pad_token_id=self._pad(),
                **{**arguments, **options},
            )
        tokens = output[0].tolist()
        if self._kept is not None:
            self._kept.give(tokens, cache)
        produced = tokens[len(prompt) :]
        return produced, bool(produced) and produced[-1] in self._ends()

    def _ends(self) -> set[int]:
        ends = self.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, (list, tuple)) else [ends]
        return {int(token) for token in (*ends, self.tokenizer.eos_token_id) if token is not None}

    def _pad(self) -> int:
        pad = self.tokenizer.pad_token_id
        return pad if pad is not None else next(iter(sorted(self._ends())), 0)

    # ------------------------------------------------------------------------------------------------------ answer

    def _parse(self, produced: list[int], prompt: list[int], tools: Sequence[dict[str, Any]] | None) -> dict[str, Any]:
        empty = {"content": None, "tool_calls": [], "reasoning": None}
        raw = self.tokenizer.decode(produced, skip_special_tokens=False)
        if getattr(self.tokenizer, "response_template", None) is not None:
            try:
                prefix = self.tokenizer.decode(prompt, skip_special_tokens=False)
                return {**empty, **_from_library(self.tokenizer.parse_response(raw, prefix=prefix, tools=tools))}
            except ValueError as error:
                return {**empty, "parse_error": f"the answer could not be read ({error}); write it again"}
        try:
            parsed = parse_output(self._without_ends(raw), tools)
        except MalformedOutput as error:
            return {**empty, "parse_error": str(error)}
        return {"content": parsed.content, "tool_calls": parsed.tool_calls, "reasoning": parsed.reasoning}

    def _without_ends(self, text: str) -> str:
        """A text without the tokens that end a turn; other special tokens may carry a notation of calls."""
        tokens = [self.tokenizer.decode([token]) for token in sorted(self._ends() | {self._pad()})]
        for token in filter(None, tokens):
            text = text.replace(token, "")
        return text


def _from_library(message: dict[str, Any]) -> dict[str, Any]:
    """The library's parse in this package's form."""
    content, thoughts = split_reasoning(message.get("content") or "")
    told = message.get("reasoning_content") or message.get("thinking") or message.get("reasoning")
    calls = []
    for call in message.get("tool_calls") or ():
        inner = call.get("function", call)
        calls.append({"name": inner["name"], "arguments": inner.get("arguments", {})})
    reasoning = "\n".join(part for part in (told, thoughts) if part) or None
    return {"content": content.strip() or None, "tool_calls": calls, "reasoning": reasoning}


def as_plain_chat(messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """A conversation for a template without tools: schemas in the system text, calls and results as tagged text."""
    plain: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "system" and tools:
            schemas = "\n".join(json.dumps(tool["function"]) for tool in tools)
            text = f"{message['content']}\n\n{JSON_INSTRUCTIONS.format(schemas=schemas)}"
            plain.append({"role": "system", "content": text})
        elif message.get("tool_calls"):
            shown = [json.dumps(call["function"]) for call in message["tool_calls"]]
            text = "\n".join(f"<tool_call>{call}</tool_call>" for call in shown)
            plain.append({"role": "assistant", "content": text})
        elif message["role"] == "tool":
            text = f"<tool_response>{message['content']}</tool_response>"
            if plain and plain[-1]["role"] == "user" and plain[-1]["content"].startswith("<tool_response>"):
                plain[-1] = {"role": "user", "content": f"{plain[-1]['content']}\n{text}"}
            else:
                plain.append({"role": "user", "content": text})
        else:
            plain.append({"role": message["role"], "content": message["content"]})
    return plain


def check_template(tokenizer: Any, tool_prompt: str, name: str) -> None:
    """Refuse a tokenizer that cannot write the conversations.

    Raises:
        ValueError: If there is no chat template, or it knows no tools.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise ValueError(
            f"the tokenizer of {name} has no chat template: set tokenizer.chat_template, or take a chat or "
            "instruct model"
        )
    text = "\n".join(template.values()) if isinstance(template, dict) else template
    if tool_prompt == "template" and "tools" not in text:
        raise ValueError(
            f"the chat template of {name} knows no tools: tool_prompt='json' puts the schemas into the system text"
        )


def _context_length(config: Any) -> int | None:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "max_position_embeddings", None)
