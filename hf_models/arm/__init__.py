"""Attention with Routed Memory: causal language models whose cache has a fixed size."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def register() -> None:
    """Put the ARM models behind `AutoConfig`, `AutoModel` and `AutoModelForCausalLM`."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    from .modeling_arm import MODELS

    for config_class, (model_class, causal_class) in MODELS.items():
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        AutoModel.register(config_class, model_class, exist_ok=True)
        AutoModelForCausalLM.register(config_class, causal_class, exist_ok=True)
        config_class.register_for_auto_class()
        causal_class.register_for_auto_class("AutoModelForCausalLM")
