from . import operators as operators
from .controller_mpc_flow import MPCFlowController as MPCFlowController
from .objective_mpc_flow import CallableObjective as CallableObjective
from .objective_mpc_flow import MeasurementObjective as MeasurementObjective
from .pipeline_mpc_flow import MPCFlowOutput as MPCFlowOutput
from .pipeline_mpc_flow import MPCFlowPipeline as MPCFlowPipeline
from .tuning_mpc_flow import tune_lambda as tune_lambda
