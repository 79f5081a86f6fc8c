"""Pictures in and out: a user's files, within bounds, and small images enlarged."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import gradio as gr
import numpy as np
import PIL.Image
import torch
from PIL import ImageOps

MIN_SIDE, MAX_PIXELS = 8, 16_000_000  # of an uploaded picture
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")


@contextmanager
def _open_within_bounds(path: str | BytesIO | None) -> Iterator[PIL.Image.Image]:
    """Open a picture whose header is within bounds; whatever is wrong with it becomes a `ValueError` for people."""
    if not path:
        raise ValueError("There is no picture yet: upload one, or take a test digit.")
    limit = f"at most {MAX_PIXELS // 1_000_000} megapixels are accepted"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)
            picture = PIL.Image.open(path, formats=FORMATS)  # reads the header, no pixel yet
        with picture:
            width, height = picture.size
            if width * height > MAX_PIXELS:
                raise ValueError(f"The picture is too large: {limit}, this one has {width * height / 1e6:.1f}.")
            if min(width, height) < MIN_SIDE:
                raise ValueError(
                    f"The picture is too small: each side must have at least {MIN_SIDE} pixels, got {width}×{height}."
                )
            yield picture
    except PIL.Image.DecompressionBombError as error:
        raise ValueError(f"The picture is too large: {limit}.") from error
    except PIL.UnidentifiedImageError as error:
        raise ValueError(f"The file is not a picture of a known kind ({', '.join(FORMATS)}).") from error
    except FileNotFoundError as error:
        raise ValueError("The picture's file is missing: upload it again.") from error
    except (OSError, SyntaxError, EOFError) as error:
        raise ValueError("The picture is damaged: it cannot be decoded.") from error


def check_header(path: str | BytesIO | None) -> None:
    """Raise `ValueError` unless the file is a picture of acceptable size; no pixel is decoded."""
    with _open_within_bounds(path):
        pass


def open_picture(path: str | None, colour: bool = False) -> PIL.Image.Image:
    """Open a user's picture and cut out its centre square.

    Args:
        path (`str`, *optional*): The file.
        colour (`bool`, defaults to `False`): Keep the colours.

    Returns:
        `PIL.Image.Image`: mode "L", or "RGB" with `colour`.

    Raises:
        ValueError: There is no file, it is no picture, it is damaged, or its size is out of bounds.
    """
    with _open_within_bounds(path) as picture:
        return _opaque(_centre_square(ImageOps.exif_transpose(picture))).convert("RGB" if colour else "L")


def _centre_square(picture: PIL.Image.Image) -> PIL.Image.Image:
    side = min(picture.size)
    left, top = ((length - side) // 2 for length in picture.size)
    return picture.crop((left, top, left + side, top + side))


def _opaque(picture: PIL.Image.Image) -> PIL.Image.Image:
    """Transparency on white; 16-bit pictures scaled to 8 bits, where Pillow would clip them."""
    if picture.mode.startswith("I"):
        return PIL.Image.fromarray((np.asarray(picture, dtype=np.float64) / 257).clip(0, 255).astype(np.uint8))
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        picture = PIL.Image.alpha_composite(PIL.Image.new("RGBA", picture.size, "white"), picture)
    return picture


def bound_canvas(canvas: gr.ImageEditor) -> gr.ImageEditor:
    """Make a canvas refuse what an upload may not be either: an API call could hand in any picture.

    The component's own method is replaced; a subclass would make gradio write a `.pyi` file beside this one.
    """
    convert = canvas.convert_and_format_image

    def convert_within_bounds(file: Any, *args, **kwargs) -> Any:
        if file is not None:
            try:
                check_header(BytesIO(file) if isinstance(file, (bytes, bytearray, memoryview)) else file.path)
            except ValueError as error:
                raise gr.Error(str(error), print_exception=False) from error
        return convert(file, *args, **kwargs)

    canvas.convert_and_format_image = convert_within_bounds
    return canvas


def to_picture(image: torch.Tensor, side: int = 384) -> PIL.Image.Image:
    """A grey image (…, h, w) in [−1, 1] as a picture of `side` pixels with sharp pixel borders."""
    values = image.detach().reshape(image.shape[-2:]).clamp(-1, 1)
    grey = ((values + 1) * 127.5).round().to(torch.uint8).numpy()
    return PIL.Image.fromarray(grey).resize((side, side), PIL.Image.Resampling.NEAREST)


def to_signed_picture(values: torch.Tensor, side: int = 384) -> tuple[PIL.Image.Image, float]:
    """Differences (…, h, w) as a picture, blue below 0, white at 0, red above; with the value of full colour."""
    values = values.detach().reshape(values.shape[-2:]).numpy()
    scale = max(float(np.abs(values).max()), 0.05)
    share = values[..., None] / scale  # (h, w, 1) in [−1, 1]
    red, blue = np.array([178, 24, 43.0]), np.array([33, 102, 172.0])
    colour = 255 + np.abs(share) * (np.where(share > 0, red, blue) - 255)
    picture = PIL.Image.fromarray(colour.round().astype(np.uint8))
    return picture.resize((side, side), PIL.Image.Resampling.NEAREST), scale
