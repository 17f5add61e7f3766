"""Training points and pictures as text for an HTML page: PNG and SVG as data addresses, rows as pairs of texts."""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ggda_ext.results.table import plainly
from ggda_ext.tables import is_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONGEST_TEXT, MOST_CELLS, SIDE = 400, 12, 112


def svg_address(figure: Figure) -> str:
    """Return a figure as an SVG data address. Text stays text, so browsers can draw letters that matplotlib lacks."""
    import matplotlib

    written = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ggda"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    svg = written.getvalue()
    svg = svg[svg.index("<svg") :]  # drop the document type declaration
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode("utf-8", "replace")).decode()


def png_address(image: Any) -> str:
    """Return an image as a PNG data address of at most `SIDE` × `SIDE` pixels. Pixels of small images are enlarged."""
    from PIL import Image

    picture = image if isinstance(image, Image.Image) else Image.fromarray(pixels(image))
    picture = picture.convert("RGBA" if picture.mode in ("RGBA", "LA", "PA") else "RGB")
    wide, high = picture.size
    scale = SIDE / max(wide, high)
    if scale > 1:
        picture = picture.resize((wide * int(scale), high * int(scale)), Image.Resampling.NEAREST)
    else:
        picture.thumbnail((SIDE, SIDE))
    written = io.BytesIO()
    picture.save(written, format="PNG")
    return "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()


def pixels(image: Any) -> np.ndarray:
    """Return an image `[H, W]`, `[C, H, W]` or `[H, W, C]` as bytes. Numbers outside 0 … 1 are rescaled."""
    if isinstance(image, tuple | dict):
        raise TypeError(
            f"images holds a {type(image).__name__}: pass the images alone, [image for image, label in data]."
        )
    array = np.asarray(image.detach().cpu() if hasattr(image, "detach") else image)
    if array.ndim == 3 and array.shape[0] in (1, 3, 4) and array.shape[2] not in (1, 3, 4):
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)) or 0 in array.shape:
        raise ValueError(
            f"images holds one of shape {list(array.shape)}: pass [H, W], [C, H, W] or [H, W, C] with 1, 3 or 4 "
            "channels, e.g. x.reshape(-1, 28, 28)."
        )
    if array.dtype == np.uint8:
        return array
    values = np.nan_to_num(array.astype(float))
    low, high = float(values.min()), float(values.max())
    if low < 0 or high > 1:
        values = (values - low) / ((high - low) or 1.0)
    return (255 * values).round().astype(np.uint8)


def row_cells(rows: Any, index: int) -> list[tuple[str, str]]:
    """Return what to show for a training point: pairs of column and value, or one text without a column."""
    row = rows.iloc[index] if hasattr(rows, "iloc") else rows[index]
    if hasattr(row, "items"):  # a dict, or a row of a pandas table
        pairs = list(row.items())
        cells = [(text(name), _value(value)) for name, value in pairs[:MOST_CELLS]]
        return [*cells, ("…", f"{len(pairs) - MOST_CELLS} more columns")] if len(pairs) > MOST_CELLS else cells
    return [("", _value(row))]


def place_of(rows: Any, index: int) -> str:
    """Return the position of a training point, with the index of its row if `rows` is a table with another index."""
    label = rows.index[index] if is_table(rows) else index
    return f"{index}" if label == index else f"{index} (index {text(plainly(label))})"


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float | np.floating) else text(plainly(value))


def text(value: Any) -> str:
    """Return a value as text that UTF-8 can encode, cut if it is long."""
    found = "".join(letter if letter.isprintable() or letter in "\n\t" else "�" for letter in str(value))
    return found if len(found) <= LONGEST_TEXT else found[: LONGEST_TEXT - 1] + "…"


def checked_count(values: Any, name: str, n: int) -> None:
    """Raise an error unless `values` has one entry for each training point."""
    if isinstance(values, str | bytes | Mapping) or not (hasattr(values, "__len__") and hasattr(values, "__getitem__")):
        raise TypeError(f"{name} is a {type(values).__name__}: pass one entry for each of {n} training points.")
    if len(values) != n:
        raise ValueError(
            f"{name} has {len(values)} entries for {n} training points: pass one for each, in their order."
        )
