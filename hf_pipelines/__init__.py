"""Pipelines, benchmarks and the command line of closedloop.

Names load on first use (the list is the stub `__init__.pyi`). A room that adds a `pipeline(...)` task has a function
`register()`, called here.
"""

import lazy_loader

import hf_models  # noqa: F401  (its rooms register their Auto classes first)
from hf_models._rooms import register_on_import

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

register_on_import(__name__, __path__)
