"""Models, configs, controllers and trainers of closedloop.

Names load on first use (the list is the stub `__init__.pyi`), so importing this package pulls in no diffusers,
datasets or gradio. A room whose classes belong to transformers' Auto classes has a function `register()`, called here.
"""

import lazy_loader

from hf_models._rooms import register_on_import

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

register_on_import(__name__, __path__)
