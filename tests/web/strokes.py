"""Digits as a hand would draw them, in strokes of points between 0 and 1."""

from __future__ import annotations

import math

Stroke = list[tuple[float, float]]


def _arc(x: float, y: float, rx: float, ry: float, start: float, stop: float, count: int = 14) -> Stroke:
    angles = [math.radians(start + (stop - start) * i / (count - 1)) for i in range(count)]
    return [(x + rx * math.cos(angle), y + ry * math.sin(angle)) for angle in angles]


DIGITS: dict[int, list[Stroke]] = {
    0: [_arc(0.5, 0.5, 0.2, 0.35, -90, 270, 20)],
    1: [[(0.4, 0.3), (0.52, 0.15), (0.52, 0.85)]],
    2: [[*_arc(0.5, 0.32, 0.18, 0.18, -170, 40), (0.32, 0.84), (0.72, 0.84)]],
    3: [[*_arc(0.48, 0.32, 0.17, 0.17, -150, 90), *_arc(0.48, 0.67, 0.19, 0.18, -90, 150)]],
    4: [[(0.45, 0.15), (0.28, 0.55), (0.72, 0.55)], [(0.6, 0.35), (0.57, 0.87)]],
    6: [[(0.6, 0.15), (0.4, 0.45), *_arc(0.5, 0.67, 0.15, 0.18, 180, -180)]],
    7: [[(0.3, 0.18), (0.7, 0.18), (0.45, 0.85)]],
}
STAR: list[Stroke] = [
    [(0.5, 0.15), (0.68, 0.85), (0.2, 0.42), (0.8, 0.42), (0.32, 0.85), (0.5, 0.15)],
]
