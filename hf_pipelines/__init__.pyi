from . import hub as hub
from .flow_control import ControlledFlowMatchEulerScheduler as ControlledFlowMatchEulerScheduler
from .flow_control import SmallFlowPipeline as SmallFlowPipeline
from .flow_control import attach_controller as attach_controller
from .mpc_flow import MPCFlowController as MPCFlowController
from .mpc_flow import MPCFlowPipeline as MPCFlowPipeline
from .mpc_flow import operators as operators
