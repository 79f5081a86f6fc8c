"""TetraJet-v2: NVFP4 fully-quantized training of any transformer, with OsciReset and OutControl (arXiv 2510.27527)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def register() -> None:
    """Put `TetraJetConfig` and `TetraJetHfQuantizer` behind `from_pretrained`, under `quant_method="tetrajet_v2"`."""
    from transformers.quantizers import auto

    from .configuration_tetrajet_v2 import TetraJetConfig
    from .quantizer_tetrajet_v2 import TetraJetHfQuantizer

    name = "tetrajet_v2"
    # the decorators refuse a name they know: after a second call, or a module reload, the newest classes stay
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING.pop(name, None)
    auto.AUTO_QUANTIZER_MAPPING.pop(name, None)
    auto.register_quantization_config(name)(TetraJetConfig)
    auto.register_quantizer(name)(TetraJetHfQuantizer)
