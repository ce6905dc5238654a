"""Which layers of a model have a sliding window, and which turn by position at all."""

from collections.abc import Sequence

from engine.models.config_file import ConfigObject, UnsupportedModel
from engine.models.families import Family, Windows

_SLIDING, _FULL = "sliding_attention", "full_attention"


def layers_have_rope(config: ConfigObject, family: Family) -> list[bool]:
    """Per layer: no_rope_layers (1 means rope), or all but every n-th in families that do so."""
    num_layers = config.integer("num_hidden_layers")
    if family.no_rope_interval is None:
        return [True] * num_layers
    stated = config.array("no_rope_layers", num_layers)
    if stated is not None:
        return [bool(flag) for flag in stated]
    interval = config.integer("no_rope_layer_interval", family.no_rope_interval)
    return [(layer + 1) % interval != 0 for layer in range(num_layers)]


def layers_have_window(
    config: ConfigObject, family: Family, have_rope: Sequence[bool]
) -> list[bool]:
    """Per layer: whether it sees the last sliding_window positions only."""
    num_layers = len(have_rope)
    if not _windows_are_on(config, family):
        return [False] * num_layers
    if family.windows is Windows.ALL:
        return [True] * num_layers
    stated = config.array("layer_types", num_layers)
    if stated is not None:
        for kind in stated:
            if kind not in (_SLIDING, _FULL):
                raise UnsupportedModel(
                    f"{config.path}: layer type {kind!r} is not supported; supported: "
                    f"{_FULL}, {_SLIDING}."
                )
        return [kind == _SLIDING for kind in stated]
    if family.windows is Windows.FLAGGED:
        # Zero is allowed here: every layer has a window.
        first = (
            0 if config.get("max_window_layers") == 0 else config.integer("max_window_layers", 28)
        )
        return [layer >= first for layer in range(num_layers)]
    if family.windows is Windows.FLAGGED_WITHOUT_ROPE:
        return [not has_rope for has_rope in have_rope]
    pattern = config.integer("sliding_window_pattern", family.window_pattern)
    return [(layer + 1) % pattern != 0 for layer in range(num_layers)]


def _windows_are_on(config: ConfigObject, family: Family) -> bool:
    # Null switches the windows off; absent means the family's own size.
    is_set = config.get("sliding_window") is not None or (
        "sliding_window" not in config.values and family.window is not None
    )
    match family.windows:
        case Windows.NEVER:
            return False
        case Windows.ALL | Windows.MIXED:
            return is_set
        case Windows.FLAGGED | Windows.FLAGGED_WITHOUT_ROPE:
            return is_set and config.flag("use_sliding_window")
