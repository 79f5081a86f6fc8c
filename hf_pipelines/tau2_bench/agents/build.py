"""From what a user writes to an agent: a name, a dictionary, a chat model, a class, or a factory."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hf_pipelines.tau2_bench.agents.scripted import NoopAgent, OracleScript, RoleConfusedAgent, TransferAgent
from hf_pipelines.tau2_bench.agents.workflow import WorkflowScript
from hf_pipelines.tau2_bench.players import Player

SCRIPTS: dict[str, type] = {
    "workflow_script": WorkflowScript,
    "oracle_script": OracleScript,
    "noop": NoopAgent,
    "transfer": TransferAgent,
    "role_confused": RoleConfusedAgent,
}
MODELS = ("transformers", "endpoint")
SECRETS = ("api_key", "apikey", "key", "token", "hf_token", "headers", "authorization", "password", "secret")
PLAYER_OPTIONS = ("instructions",)


def build_agent(spec: Any) -> Callable[[], Player]:
    """A maker of fresh agents; a model that had to be loaded is shared between them.

    Args:
        spec: A name of `SCRIPTS`; a dictionary `{"kind": name, **options}`, where `kind` may be `"transformers"`
            (`model`, …) or `"endpoint"` (`base_url`, `model`, …), too; a `ChatModel`; a `Player` class; or a function
            without arguments that returns a `Player`.

    Raises:
        ValueError: If the name or an option is unknown.
        TypeError: If it is none of these.
    """
    if isinstance(spec, str):
        spec = {"kind": spec}
    if isinstance(spec, Mapping):
        kind, options = _kind(spec, "agent", (*SCRIPTS, *MODELS))
        if kind in SCRIPTS:
            return _maker(SCRIPTS[kind], options, f"agent kind={kind!r}")
        return _around(load_model(kind, options))
    return _of_object(spec, "agent", _around)


def _around(model: Any) -> Callable[[], Player]:
    from hf_pipelines.tau2_bench.agents.llm_agent import LLMAgent

    return partial(LLMAgent, model)


def load_model(kind: str, options: Mapping[str, Any]) -> Any:
    """A chat model of a kind of `MODELS`, loaded now.

    Raises:
        ValueError: If the kind or an option is unknown.
    """
    if kind == "transformers":
        from hf_pipelines.tau2_bench.agents.transformers_chat import TransformersChat

        options = dict(options)
        if "model" not in options:
            raise ValueError("kind='transformers' needs model=, a folder or Hub id")
        return _called(TransformersChat.from_pretrained, (options.pop("model"),), options, "kind='transformers'")
    if kind == "endpoint":
        from hf_pipelines.tau2_bench.agents.endpoint import EndpointChat

        return _called(EndpointChat, (), dict(options), "kind='endpoint'")
    raise ValueError(f"kind={kind!r} is not one of {', '.join(MODELS)}")


def _called(function: Callable[..., Any], positional: tuple, options: dict[str, Any], what: str) -> Any:
    try:
        return function(*positional, **options)
    except TypeError as error:
        raise ValueError(f"{what}: {error}") from error


def _maker(cls: type, options: dict[str, Any], what: str) -> Callable[[], Player]:
    _called(cls, (), options, what)  # a wrong option shows now, not in the middle of a run
    return partial(cls, **options)


def _kind(spec: Mapping[str, Any], what: str, allowed: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    options = dict(spec)
    kind = options.pop("kind", None)
    if kind not in allowed:
        raise ValueError(f"{what} kind={kind!r} is not one of {', '.join(allowed)}")
    return kind, options


def _of_object(spec: Any, what: str, around: Callable[[Any], Callable[[], Player]]) -> Callable[[], Player]:
    """A class, a chat model or a factory."""
    if isinstance(spec, type) and isinstance_of_player(spec):
        return spec
    if isinstance_of_player(spec):
        raise TypeError(f"{what}: give the class or a function that makes a player, not one {type(spec).__name__}")
    if is_chat_model(spec):
        return around(spec)
    if callable(spec):
        return spec
    raise TypeError(
        f"{what}={spec!r:.80} must be a name, a dictionary with kind=, a chat model, a Player class or a function "
        "that returns a Player"
    )


def isinstance_of_player(value: Any) -> bool:
    """Whether an object, or a class's instances, have a player's methods."""
    return callable(getattr(value, "start", None)) and callable(getattr(value, "respond", None))


def is_chat_model(value: Any) -> bool:
    """Whether an object answers conversations: it is called with `messages`."""
    import inspect

    if not callable(value) or isinstance(value, type):
        return False
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return False
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return bool(needed)


def describe(spec: Any) -> dict[str, Any]:
    """What a player is, for the configuration's hash and for reports: names and options, JSON-able, without secrets.

    Args:
        spec: As for `build_agent`, `build_user`, or a `ChatModel`.
    """
    if isinstance(spec, str):
        return {"kind": spec}
    if isinstance(spec, Mapping):
        return {str(key): _plain(value) for key, value in spec.items() if not _is_secret(str(key))}
    described = getattr(spec, "describe", None)
    if callable(described) and not isinstance(spec, type):
        return {key: _plain(value) for key, value in described().items() if not _is_secret(str(key))}
    named = spec if hasattr(spec, "__qualname__") else type(spec)
    if isinstance(spec, partial):
        keywords = {key: _plain(value) for key, value in spec.keywords.items() if not _is_secret(key)}
        positional = [_plain(value) for value in spec.args]
        return {**describe(spec.func), **keywords, **({"args": positional} if positional else {})}
    return {"kind": "custom", "name": f"{named.__module__}.{named.__qualname__}"}


def _is_secret(name: str) -> bool:
    return name.lower() in SECRETS


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if not _is_secret(str(key))}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(item) for item in value)
    return describe(value) if callable(value) else str(value)
