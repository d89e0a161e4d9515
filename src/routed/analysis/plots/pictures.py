"""Colour scales of matrices, and matrices as PNG pictures, which stay small where a cell each would be a shape of its
own.
"""

from __future__ import annotations

import base64
import io
import json
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

#: Scheme -> nine colours from its low end to its high end, between which colours are interpolated.
SCHEMES = {
    "cividis": "00224e 1a386f 434e6c 61656f 7d7c78 9b9476 bcae6c dec958 fee838",
    "redblue": "67001f bb2a34 e58368 fbceb7 f6f7f7 c0dceb 68abd0 2870b1 053061",
    "blues": "f7fbff deebf7 c6dbef 9dcae1 6aaed6 4191c6 2070b4 08509b 08306b",
}

#: Pixels of a picture along its longer side, at least: viewers smooth what they enlarge.
PIXELS = 480


class Scheme(NamedTuple):
    """A colour scale: its name, its ends, the title of its legend, and the labels of its ticks by their values.

    The legend stands beside the panel or `below` it.
    """

    name: str
    domain: tuple[Any, Any]
    title: str = ""
    log: bool = False
    ticks: dict[float, str] | None = None
    below: bool = False

    def colours(self, values: np.ndarray) -> np.ndarray:
        """Returns the colours of values: uint8 [..., 4], transparent where a value is NaN."""
        anchors = np.array([[int(code[i : i + 2], 16) for i in (0, 2, 4)] for code in SCHEMES[self.name].split()])
        low, high = np.log(self.domain) if self.log else self.domain
        with np.errstate(invalid="ignore", divide="ignore"):
            shares = ((np.log(values) if self.log else values) - low) / (high - low)
        shares = np.clip(np.nan_to_num(shares), 0, 1)
        rgb = [np.interp(shares, np.linspace(0, 1, len(anchors)), channel) for channel in anchors.T]
        return np.stack([*rgb, np.where(np.isnan(values), 0, 255)], -1).round().astype(np.uint8)

    def is_dark(self, value: Any) -> bool:
        """True if white text is readable on the colour of a value."""
        red, green, blue, _ = self.colours(np.array(value, float))
        return bool(0.3 * red + 0.59 * green + 0.11 * blue < 140)

    def channel(self, field: str) -> dict[str, Any]:
        """Returns the colour channel of a field, with its legend where the scheme has a title."""
        codes = [f"#{code}" for code in SCHEMES[self.name].split()]
        low, high = (float(end) for end in self.domain)
        steps = (np.geomspace if self.log else np.linspace)(low, high, len(codes))
        scale: dict[str, Any] = {"type": "log" if self.log else "linear", "range": codes, "interpolate": "rgb"}
        scale |= {"clamp": True, "nice": False, "domain": [float(f"{step:.6g}") for step in steps]}
        legend: dict[str, Any] = {"title": self.title.split("\n"), "gradientLength": 150, "format": ".2~g"}
        legend |= {"orient": "bottom", "direction": "horizontal"} if self.below else {}
        if self.ticks:
            values = [*self.ticks]
            names = f"{json.dumps([*self.ticks.values()])}[indexof({json.dumps(values)}, datum.value)] || ''"
            legend |= {"values": values, "labelExpr": names}
        return {"field": field, "type": "quantitative", "scale": scale, "legend": legend if self.title else None}


def picture(pixels: np.ndarray) -> str:
    """Returns an image as the address of a PNG, enlarged without smoothing. pixels: uint8 [rows, columns, 3 or 4]."""
    times = max(1, -(-PIXELS // max(pixels.shape[:2])))
    return f"data:image/png;base64,{base64.b64encode(encode(pixels.repeat(times, 0).repeat(times, 1))).decode()}"


def encode(pixels: np.ndarray) -> bytes:
    """Returns an image as PNG. pixels: uint8 [rows, columns, 3 or 4]."""
    return _png(Image.fromarray(pixels))


def recompressed(png: bytes) -> bytes:
    """Returns a PNG with the same pixels in about a third of the bytes: Vega's converter hardly compresses."""
    return _png(Image.open(io.BytesIO(png)))


def _png(image: Image.Image) -> bytes:
    content = io.BytesIO()
    image.save(content, "PNG", optimize=True)
    return content.getvalue()
