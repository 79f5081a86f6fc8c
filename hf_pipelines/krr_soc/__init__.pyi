from .baselines_krr_soc import BASELINES as BASELINES
from .baselines_krr_soc import european_price as european_price
from .baselines_krr_soc import longstaff_schwartz as longstaff_schwartz
from .baselines_krr_soc import randomized_least_squares as randomized_least_squares
from .baselines_krr_soc import tsitsiklis_van_roy as tsitsiklis_van_roy
from .pipeline_krr_soc import OptimalStoppingPipeline as OptimalStoppingPipeline
from .references_krr_soc import CASES as CASES
from .references_krr_soc import BermudanLattice as BermudanLattice
