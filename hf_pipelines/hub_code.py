"""Give a model or pipeline repository the code it needs, and point its configs at it."""

import importlib
import json
import pkgutil
from pathlib import Path
from typing import Any

from hf_models._rooms import register_all
from hf_pipelines.code_bundle import find_cycle, flatten, is_own, resolve

Plan = dict[str, Path | bytes]
# config file -> key that names a class -> Auto class that reads it
_PROCESSOR_CONFIGS = {
    "preprocessor_config.json": {
        "feature_extractor_type": "AutoFeatureExtractor",
        "image_processor_type": "AutoImageProcessor",
    },
    "processor_config.json": {"processor_class": "AutoProcessor"},
}


def carry_code(plan: dict[str, Path | bytes]) -> None:
    """Add flattened code to the plan of an exported model repository, and rewrite its configs.

    Args:
        plan (`dict[str, Path | bytes]`): Content by relative path; changed in place. A repository without code of ours
            stays as it is.

    Raises:
        ValueError: A config names a class of ours that does not exist or is not registered, or code cannot be carried.
    """
    if "model_index.json" in plan:
        _carry_pipeline(plan, "")
        return
    for file, keys in _PROCESSOR_CONFIGS.items():
        if file in plan:
            _carry_processor(plan, file, keys)
    if "config.json" in plan:
        config = _read(plan, "config.json")
        if "_class_name" in config:
            _carry_diffusers_model(plan, config)
        else:
            _carry_transformers_model(plan, config)
            for file in [key for key in plan if key.count("/") == 1 and key.endswith("/config.json")]:
                _carry_transformers_model(plan, _read(plan, file), file)  # `subfolder=`: its code stands in the root


def own_module(class_name: str) -> str | None:
    """Find the module of ours that defines a public class, without importing it.

    Args:
        class_name (`str`): A name that the stub of a room lists.

    Returns:
        `str` or `None`: dotted name of the module; `None` where no room has such a class.
    """
    for package in ("hf_models", "hf_pipelines"):
        for room in pkgutil.iter_modules(importlib.import_module(package).__path__):
            if room.ispkg and not room.name.startswith("_"):
                reference = resolve(f"{package}.{room.name}", class_name)
                if reference is not None and reference.name is not None:
                    return reference.module
    return None


def _read(plan: Plan, key: str) -> dict[str, Any]:
    item = plan[key]
    text = item.decode() if isinstance(item, bytes) else item.read_text(encoding="utf-8")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{key} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{key} must hold a JSON object, got {type(value).__name__}.")
    return value


def _write_json(plan: Plan, key: str, value: dict[str, Any]) -> None:
    plan[key] = (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _add_files(plan: Plan, prefix: str, files: dict[str, str]) -> None:
    for name, text in files.items():
        before = plan.get(prefix + name)
        if isinstance(before, bytes) and before != text.encode():
            raise ValueError(f"two different modules would be written to {prefix + name}; rename one of them.")
        plan[prefix + name] = text.encode()


# -------------------------------------------------------------------------------------------------------- diffusers


def _carry_pipeline(plan: Plan, prefix: str) -> None:
    """Treat the pipeline whose folder is `prefix`, and any pipeline that is a component of it."""
    index = _read(plan, f"{prefix}model_index.json")
    modules, named = [], []
    for name, value in index.items():
        if name.startswith("_") or not isinstance(value, list) or len(value) != 2:
            continue
        if f"{prefix}{name}/model_index.json" in plan:
            _carry_pipeline(plan, f"{prefix}{name}/")
            class_name = _read(plan, f"{prefix}{name}/model_index.json")["_class_name"]
            if isinstance(class_name, list):
                index[name] = class_name
        elif isinstance(value[0], str) and is_own(value[0]):
            modules.append(value[0])
            entry = value[0].rpartition(".")[2]
            files = _flatten_for_diffusers(value[0])
            _add_files(plan, f"{prefix}{name}/", files)
            named += [f"{name}.{file.removesuffix('.py')}" for file in files if file != f"{entry}.py"]
            index[name] = [entry, value[1]]
    class_name = index.get("_class_name")
    module = own_module(class_name) if isinstance(class_name, str) else None
    if module is not None:
        # From the Hub, diffusers fetches only the entry file of a component with weights, but every file that the
        # pipeline's own file names; so that file names the components' companions. And a nested pipeline of ours
        # trusts a component's code where its own folder holds the same file.
        index["_class_name"] = [module.rpartition(".")[2], class_name]
        _add_files(plan, prefix, _flatten_for_diffusers(module, also=modules, named=named))
    elif named and isinstance(class_name, str):
        raise ValueError(
            f"{prefix}model_index.json: {class_name} of diffusers itself cannot fetch {', '.join(named)}; put that "
            "component's code into one module."
        )
    _write_json(plan, f"{prefix}model_index.json", index)


def _flatten_for_diffusers(module: str, also: list[str] = (), named: list[str] = ()) -> dict[str, str]:
    circle = next((found for name in (module, *also) if (found := find_cycle(name)) is not None), None)
    if circle is not None:
        raise ValueError(
            f"{circle} imports itself through other modules; diffusers cannot load such code from the Hub."
        )
    return flatten(module, also=also, named=named)


def _carry_diffusers_model(plan: Plan, config: dict[str, Any]) -> None:
    """A single model of diffusers' kind: `diffusers.AutoModel` reads `auto_map`."""
    class_name = config["_class_name"]
    module = own_module(class_name)
    if module is None:
        return
    config["auto_map"] = {"AutoModel": f"{module.rpartition('.')[2]}.{class_name}"}
    _add_files(plan, "", _flatten_for_diffusers(module))
    _write_json(plan, "config.json", config)


# -------------------------------------------------------------------------------------------------------- transformers


def _reference(cls: type) -> str:
    return f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}"


def _own_class(class_name: str) -> type | None:
    module = own_module(class_name)
    return None if module is None else getattr(importlib.import_module(module), class_name)


def _auto_class(cls: type) -> str:
    name = vars(cls).get("_auto_class")
    if name is None:
        raise ValueError(
            f"{cls.__name__} has no Auto class; call `{cls.__name__}.register_for_auto_class(…)` in `register()` of "
            f"{cls.__module__.rpartition('.')[0]}."
        )
    return name


def _carry_processor(plan: Plan, file: str, keys: dict[str, str]) -> None:
    config = _read(plan, file)
    for key, auto_class in keys.items():
        cls = _own_class(config[key]) if isinstance(config.get(key), str) else None
        if cls is not None:
            config.setdefault("auto_map", {})[auto_class] = _reference(cls)
            _add_files(plan, "", flatten(cls.__module__))
            _write_json(plan, file, config)


def _carry_transformers_model(plan: Plan, config: dict[str, Any], file: str = "config.json") -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    register_all()
    architectures = config.get("architectures") or []
    models = [cls for name in architectures if (cls := _own_class(name)) is not None]
    model_type = config.get("model_type")
    config_class = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else None  # noqa: SIM401  (a lazy mapping)
    if models:
        config_class = models[0].config_class
    if config_class is None:
        raise ValueError(
            f"{file}: no class of ours or of transformers for `model_type` {model_type!r} and `architectures` "
            f"{architectures}; is the room's class in its `__init__.pyi`?"
        )
    classes = {_auto_class(cls): cls for cls in models}
    if is_own(config_class.__module__):
        classes["AutoConfig"] = config_class
    if not classes:
        return  # a repository of a library class carries no code
    config["auto_map"] = {name: _reference(cls) for name, cls in classes.items()}
    for cls in classes.values():
        _add_files(plan, "", flatten(cls.__module__))
    if tasks := _custom_tasks(models):
        config["custom_pipelines"] = {task: info for task, (info, _) in tasks.items()}
        for _, module in tasks.values():
            _add_files(plan, "", flatten(module))
    _write_json(plan, file, config)


def _custom_tasks(models: list[type]) -> dict[str, tuple[dict[str, Any], str]]:
    """`pipeline(...)` tasks of the models' own rooms: what the config says of each, and the module of its class."""
    from transformers.pipelines import PIPELINE_REGISTRY

    tasks = {}
    for task, info in PIPELINE_REGISTRY.supported_tasks.items():
        cls = info["impl"]
        if not isinstance(cls, type) or not is_own(cls.__module__):
            continue
        for model in models:
            names = {served.__name__ for served in info["pt"]}
            served = not names or names & {_auto_class(model), model.__name__}
            if served and cls.__module__.split(".")[1] == model.__module__.split(".")[1]:
                entry = {key: value for key, value in info.items() if key not in ("impl", "pt")}
                tasks[task] = (entry | {"impl": _reference(cls), "pt": [_auto_class(model)]}, cls.__module__)
    return dict(sorted(tasks.items()))
