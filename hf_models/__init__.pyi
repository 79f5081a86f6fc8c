from .flow_diversity import ImageFeatureEncoder as ImageFeatureEncoder
from .small_flow import GaussianMixtureFlowModel as GaussianMixtureFlowModel
from .small_flow import SmallFlowModel as SmallFlowModel
