from .small_flow import GaussianMixtureFlowModel as GaussianMixtureFlowModel
from .small_flow import SmallFlowModel as SmallFlowModel
