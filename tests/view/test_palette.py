"""Colours of report and viewer: all eyes can tell series apart, and text can be read on its background.

Eyes without one kind of cones are simulated by the matrices of Machado, Oliveira and Fernandes (A
Physiologically-based Model for Simulation of Color Vision Deficiency, IEEE TVCG 2009, table 1, severity 1.0),
in linear RGB; distances are CIE 1976 in L*a*b* under D65.
"""

import itertools
from typing import Literal

import numpy as np
import pytest

from treetune.view.charts import N_COLOURS
from treetune.view.templates import read_palette

SERIES = [f"c{i}" for i in range(N_COLOURS)]
PHASES = ["generation", "credit", "training", "sync", "evaluation", "commit", "choice", "other"]

EYES = {
    "all cones": np.eye(3),
    "no red cones": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no green cones": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}
LEAST_DISTANCE = 10.0
"""The least distance of two series. Areas that differ by 2.3 can just be told apart; thin lines need more."""

XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
WHITE = XYZ.sum(axis=1)


Theme = Literal["light", "dark"]


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    ratio = XYZ @ np.clip(rgb, 0, 1) / WHITE
    root = np.where(ratio > (6 / 29) ** 3, np.cbrt(ratio), ratio / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])


def contrast(ink: str, paper: str) -> float:
    low, high = sorted(float(XYZ[1] @ linear(colour)) for colour in (ink, paper))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("names", [SERIES, PHASES], ids=["series", "phases"])
@pytest.mark.parametrize("eyes", EYES)
def test_colours_of_one_figure_are_told_apart(theme: Theme, names: list[str], eyes: str) -> None:
    colours = read_palette(theme)
    seen = {name: lab(EYES[eyes] @ linear(colours[name])) for name in names}
    too_close = {}
    for first, second in itertools.combinations(names, 2):
        distance = float(np.linalg.norm(seen[first] - seen[second]))
        if distance < LEAST_DISTANCE:
            too_close[first, second] = round(distance, 1)
    assert too_close == {}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_read_and_lines_can_be_seen(theme: Theme) -> None:
    colours = read_palette(theme)
    inks = ("ink", "soft", "accent", "good", "bad", "warn", "way")
    papers = ("paper", "panel", "at")
    ratios = {(ink, paper): contrast(colours[ink], colours[paper]) for ink in inks for paper in papers}
    # 4.5 is the contrast that WCAG 2 asks of text (success criterion 1.4.3).
    assert {pair: ratio for pair, ratio in ratios.items() if ratio < 4.5} == {}
