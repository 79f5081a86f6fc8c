from . import hub as hub
from .flow_control import SmallFlowPipeline as SmallFlowPipeline
