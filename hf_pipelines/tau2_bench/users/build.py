"""From what a user writes to a customer."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hf_pipelines.tau2_bench.agents.build import MODELS, _kind, _maker, _of_object, load_model
from hf_pipelines.tau2_bench.players import Player
from hf_pipelines.tau2_bench.users.scripted import ScriptedUser

PLAYER_OPTIONS = ("guard",)


def build_user(spec: Any) -> Callable[[], Player]:
    """A maker of fresh customers; a model that had to be loaded is shared between them.

    Args:
        spec: `"scripted"`; `{"kind": "scripted", "noise": {"omit": 0.1}}`; `{"kind": "llm", "model": folder, …}` or
            `{"kind": "llm", "base_url": …, "model": …}` with `guard`; `kind` may be `"transformers"` or `"endpoint"`,
            too; a `ChatModel`; a `Player` class; or a function without arguments that returns a `Player`.

    Raises:
        ValueError: If the name or an option is unknown.
        TypeError: If it is none of these.
    """
    if isinstance(spec, str):
        spec = {"kind": spec}
    if not isinstance(spec, Mapping):
        return _of_object(spec, "user", _around)
    kind, options = _kind(spec, "user", ("scripted", "llm", *MODELS))
    if kind == "scripted":
        return _maker(ScriptedUser, options, "user kind='scripted'")
    own = {name: options.pop(name) for name in PLAYER_OPTIONS if name in options}
    model = options.get("model")
    if kind == "llm" and callable(model):
        return _around(model, **own)
    if kind == "llm":
        kind = "endpoint" if "base_url" in options else "transformers"
    return _around(load_model(kind, options), **own)


def _around(model: Any, **options: Any) -> Callable[[], Player]:
    from hf_pipelines.tau2_bench.users.llm import LLMUser

    LLMUser(model, **options)  # a wrong option shows now
    return partial(LLMUser, model, **options)
