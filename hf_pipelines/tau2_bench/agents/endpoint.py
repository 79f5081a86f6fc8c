"""A chat model behind an OpenAI-compatible endpoint, through `huggingface_hub.InferenceClient`."""

import json
import random
import time
from typing import Any

from hf_pipelines.tau2_bench.agents.tool_parsers import split_reasoning
from hf_pipelines.tau2_bench.players import ContextWindowExceeded, InfrastructureError

RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
LONGEST_WAIT_S = 30.0
CONTEXT_WORDS = ("context length", "context_length", "maximum context", "context window", "too many tokens")


class EndpointChat:
    """A model that answers over HTTP.

    Args:
        base_url (`str`): Such as `"http://localhost:8000/v1"`.
        model (`str`): Its name at the endpoint.
        api_key (`str`, *optional*): Key; never shown or stored.
        temperature (`float`, defaults to 0): Sampling temperature.
        max_tokens (`int`, *optional*): Longest answer.
        timeout_s (`float`, defaults to 120): Seconds per request.
        retries (`int`, defaults to 3): Further tries after a time-out, a refused connection or one of 408, 409, 425,
            429, 500, 502, 503, 504.
        backoff_s (`float`, defaults to 1): Wait before the first further try; doubles each time.
        **options: Further arguments of `chat_completion`, such as `top_p` or `extra_body`.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        base_url: str,
        model: str = "default",
        api_key: str | None = None,
        temperature: float = 0.0,
        max_tokens: int | None = None,
        timeout_s: float = 120.0,
        retries: int = 3,
        backoff_s: float = 1.0,
        **options: Any,
    ) -> None:
        from huggingface_hub import InferenceClient

        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url={base_url!r} must start with http:// or https://")
        if retries < 0 or timeout_s <= 0 or backoff_s < 0:
            raise ValueError(f"retries={retries}, timeout_s={timeout_s}, backoff_s={backoff_s} must not be negative")
        self.base_url, self.model, self.retries, self.backoff_s = base_url, model, retries, backoff_s
        self.options = {"temperature": temperature, "max_tokens": max_tokens, **options}
        self.timeout_s = timeout_s
        self._client = InferenceClient(base_url=base_url, api_key=api_key or "none", timeout=timeout_s)

    def describe(self) -> dict[str, Any]:
        """For reports and the configuration's hash, without the key."""
        options = {name: value for name, value in self.options.items() if value is not None}
        return {"kind": "endpoint", "base_url": self.base_url, "model": self.model, **options}

    def __call__(
        self,
        messages: list[dict[str, Any]],
        tools: Any = None,
        tool_choice: Any = None,
        seed: int | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Answer a conversation.

        Raises:
            InfrastructureError: If the endpoint does not answer after all tries, or refuses.
            ContextWindowExceeded: If the conversation is too long for the model.
        """
        arguments = {**self.options, **options, "seed": seed, "model": self.model}
        if tools:
            arguments.update(tools=list(tools), tool_choice=tool_choice or "auto")
        wire = [_on_the_wire(message) for message in messages]
        for attempt in range(self.retries + 1):
            try:
                return _answer(self._client.chat_completion(wire, **arguments))
            except Exception as error:
                wait = self._wait(error, attempt)
                if wait is None:
                    raise _named(error, attempt + 1) from error
            time.sleep(wait)
        raise AssertionError("unreachable")

    def _wait(self, error: Exception, attempt: int) -> float | None:
        """Seconds before the next try; `None` where there is none."""
        status = _status(error)
        if attempt >= self.retries or (status is not None and status not in RETRIED):
            return None
        if status is None and not _is_connection(error):
            return None
        asked = getattr(getattr(error, "response", None), "headers", {}).get("retry-after", "")
        wait = float(asked) if asked.replace(".", "", 1).isdigit() else self.backoff_s * 2**attempt
        return min(wait, LONGEST_WAIT_S) * (1 + 0.1 * random.Random(attempt).random())


def _on_the_wire(message: dict[str, Any]) -> dict[str, Any]:
    """Arguments travel as JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "content": message.get("content") or None, "tool_calls": calls}


def _status(error: Exception) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _is_connection(error: Exception) -> bool:
    """Whether nobody answered, or the answer was no completion: both can pass."""
    from huggingface_hub.errors import InferenceTimeoutError, OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return False
    transport = any(base.__name__ == "TransportError" for base in type(error).__mro__)  # of httpx, under either name
    return transport or isinstance(error, (InferenceTimeoutError, OSError, ValueError))


def _named(error: Exception, tries: int) -> Exception:
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return InfrastructureError(
            "HF_HUB_OFFLINE=1 keeps huggingface_hub from all requests, those to your own endpoint included: unset it "
            "for this process"
        )
    detail = f"{error} {getattr(getattr(error, 'response', None), 'text', '')}".lower()
    if _status(error) in (400, 413) and any(words in detail for words in CONTEXT_WORDS):
        return ContextWindowExceeded(f"the endpoint says that the conversation is too long: {error}")
    return InfrastructureError(f"the endpoint failed after {tries} tries ({type(error).__name__}: {error})")


def _answer(completion: Any) -> dict[str, Any]:
    choice = completion.choices[0]
    message = choice.message
    content, thoughts = split_reasoning(message.content or "")
    told = message.get("reasoning_content") or message.get("reasoning") or message.get("thinking")
    calls = [
        {"id": call.id, "name": call.function.name, "arguments": call.function.arguments}
        for call in message.tool_calls or ()
    ]
    usage = completion.usage
    return {
        "content": content.strip() or None,
        "tool_calls": calls,
        "reasoning": "\n".join(part for part in (told, thoughts) if part) or None,
        "usage": {n: usage.get(n) for n in ("prompt_tokens", "completion_tokens")} if usage else None,
        "finish_reason": choice.finish_reason,
    }
