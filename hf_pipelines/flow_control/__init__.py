"""What the two flow-control methods share: scheduler hook, controller base, codecs, velocities, metrics.

For convenience every public name of `hf_pipelines` can be imported from here too, so that
`from hf_pipelines.flow_control import MPCFlowPipeline, operators` works.
"""

import importlib

import lazy_loader

_own_attribute, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str):
    try:
        return _own_attribute(name)
    except AttributeError:
        package = importlib.import_module("hf_pipelines")
        if name in package.__all__:
            return getattr(package, name)
        raise
