"""Methods of peers by name; kvpress is imported when one of its presses is made."""

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from kvpress import BasePress


class Recipe(NamedTuple):
    """How a press is made; all else is kvpress' default.

    Attributes:
        press: Name of a class.
        options: Its options.
        around: Name of the class that shares the budget out among heads, if one does.
    """

    press: str
    options: dict[str, Any] = {}  # noqa: RUF012 - a named tuple's default
    around: str = ""


PRESSES = {
    "kvzip": Recipe("KVzipPress"),
    "kvzip-plus": Recipe("KVzipPress", {"kvzip_plus_normalization": True}),
    "expected-attention": Recipe("ExpectedAttentionPress"),
    # What kvpress recommends for this pair.
    "adakv-expected-attention": Recipe("ExpectedAttentionPress", {"epsilon": 1e-2}, "AdaKVPress"),
    "keydiff": Recipe("KeyDiffPress"),
    "snapkv": Recipe("SnapKVPress"),
    "adakv-snapkv": Recipe("SnapKVPress", around="AdaKVPress"),
    "critical-adakv-snapkv": Recipe("SnapKVPress", around="CriticalAdaKVPress"),
    "streaming-llm": Recipe("StreamingLLMPress"),
    "random": Recipe("RandomPress"),
    "knorm": Recipe("KnormPress"),
}


OPENVINO_METHODS = ("openvino", "openvino-sum", "openvino-kvcrush")
"""Scores divided by a token's age, summed up, and the former with a quarter of the evictable blocks
chosen by KVCrush. Not here: rotation, which takes RoPE's base for 10,000 whatever the model's is,
and ADAPTIVE_RKV, which fails on CPU."""

PEER_METHODS = {"kvpress": tuple(PRESSES), "openvino": OPENVINO_METHODS}
"""By who answers."""


def make_press(name: str, compression_ratio: float) -> "BasePress":
    """Makes a press.

    Args:
        name: Key of `PRESSES`.
        compression_ratio: Share of the entries to drop.
    """
    import kvpress

    recipe = PRESSES[name]
    press = getattr(kvpress, recipe.press)(compression_ratio=compression_ratio, **recipe.options)
    made: BasePress = getattr(kvpress, recipe.around)(press) if recipe.around else press
    return made
