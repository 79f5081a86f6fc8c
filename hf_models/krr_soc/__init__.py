"""KRR-DP: optimal stopping and stochastic control by kernel ridge regression, with price bounds."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def register() -> None:
    """Put the model behind `AutoConfig` and `AutoModel`."""
    from transformers import AutoConfig, AutoModel

    from .configuration_krr_soc import KrrSocConfig
    from .modeling_krr_soc import KrrSocModel

    AutoConfig.register(KrrSocConfig.model_type, KrrSocConfig, exist_ok=True)
    AutoModel.register(KrrSocConfig, KrrSocModel, exist_ok=True)
    KrrSocConfig.register_for_auto_class()
    KrrSocModel.register_for_auto_class("AutoModel")
