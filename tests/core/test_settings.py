"""Settings check their fields against the declared types and bounds."""

import dataclasses
from typing import Annotated, Literal

import numpy as np
import pytest

from vitrail.core.errors import UsageError
from vitrail.core.settings import Bounds, Pair, Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window(Settings):
    """Settings of every checked type."""

    size: Annotated[Pair, Bounds(1, 64)] = (8, 8)
    """Height and width."""
    count: Annotated[int, Bounds(1, 9)] = 3
    limit: Annotated[int, Bounds(1, 9)] | None = None
    share: Annotated[float, Bounds(0.1, 1, or_zero=True)] = 0.5
    colour: Annotated[tuple[int, int, int], Bounds(0, 255)] = (0, 0, 0)
    weights: Annotated[tuple[float, ...], Bounds(-1, 1)] = (0.5,)
    mode: Literal["open", "closed"] = "open"
    is_wide: bool = False
    rate: Annotated[float, Bounds(0, below=1)] = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class WideWindow(Window):
    """A redeclared field keeps its bounds, unless it declares others."""

    count: int = 9
    share: Annotated[float, Bounds(0, 2)] = 2


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"size": 65}, "Size must be an integer from 1 to 64, got 65."),
        ({"size": (1, 2, 3)}, "Size must be an integer or a pair"),
        ({"count": 10}, "Count must be an integer from 1 to 9, got 10."),
        ({"count": True}, "Count must be an integer from 1 to 9, got True."),
        ({"limit": 0}, "Limit must be an integer from 1 to 9, got 0."),
        ({"share": 0.05}, "Share must be 0 or a number from 0.1 to 1, got 0.05."),
        ({"share": float("nan")}, "Share must be 0 or a number from 0.1 to 1, got nan."),
        ({"colour": (1, 2)}, "Colour must be 3 numbers, got (1, 2)."),
        ({"colour": (1, 2, 256)}, "Colour must be an integer from 0 to 255, got 256."),
        ({"weights": ()}, "Weights must be a list of numbers, got ()."),
        ({"weights": (2.0,)}, "Weights must be a number from -1 to 1, got 2.0."),
        ({"mode": "close"}, "Mode must be one of open, closed, got 'close'. Did you mean 'closed'?"),
        ({"rate": 1}, "Rate must be a number of at least 0 and below 1, got 1."),
        ({"is_wide": 1}, "Is wide must be true or false, got 1."),
    ],
    ids=str,
)
def test_setting_outside_its_bounds_is_rejected(setting, message):
    with pytest.raises(UsageError) as caught:
        Window(**setting)
    assert str(caught.value).startswith(message)


def test_redeclared_field_inherits_its_bounds():
    with pytest.raises(UsageError, match="Count must be an integer from 1 to 9, got 10"):
        WideWindow(count=10)
    assert WideWindow(share=1.5).share == 1.5


def test_numpy_values_of_settings_become_python_values():
    window = Window(size=np.int64(5), count=np.int32(2), share=0, colour=[1, 2, 3], weights=[-1, 1.0])
    assert (window.size, window.colour, window.weights, window.limit) == ((5, 5), (1, 2, 3), (-1, 1.0), None)
    assert {type(window.count), *map(type, window.size)} == {int}
    assert Window.from_json(window.to_json()) == window
