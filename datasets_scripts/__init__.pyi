from .build import build as build
from .build import get_builder as get_builder
from .build import list_builders as list_builders
from .digits import Digits as Digits
from .digits import load_digit_tensors as load_digit_tensors
from .face_and_animal_photos import AFHQ as AFHQ
from .face_and_animal_photos import CelebA as CelebA
from .sample_photos import SamplePhotos as SamplePhotos
