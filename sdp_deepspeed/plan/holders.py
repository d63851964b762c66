"""How many subnetworks hold each unit: one number for all, or by the rules of `coverage` and `holders`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from sdp_deepspeed.config import KEY, SubnetworkConfig
from sdp_deepspeed.coverage import CoverageRule, HoldersRule
from sdp_deepspeed.messages import listed

_COVERAGE_DIGITS = 4  # 0.3333 means 1/3: the next coverage of 1024 subnetworks is ten times farther away
_STEPS = 8  # of a profile: more numbers of holders would need more holder sets than there may be
_MAX_NAMES = 3  # that a message lists

Rule = CoverageRule | HoldersRule


def holders_of_units(
    block: SubnetworkConfig, k: int, names: Sequence[str], layers: Sequence[int], num_layers: int
) -> tuple[int, ...]:
    """p of each unit.

    Args:
        block: with coverage or holders.
        k: number of subnetworks.
        names: of the units.
        layers: for each unit the index of its layer, counted from the model's first.
        num_layers: of the model; the first and the last ones may have no unit.

    Raises:
        ValueError: more than k holders, coverage that is no whole number of holders, or a rule that decides nothing,
            as if all its units are in `whole_ends`.
    """
    number = common_number(block, k)
    if number is not None:
        return (number,) * len(names)
    rules = _rules(block)
    chosen = [next((i for i, rule in enumerate(rules) if re.search(rule.units, name)), None) for name in names]
    for index, rule in enumerate(rules):
        if index not in chosen:
            _refuse_idle(rule, _path(block, index), names)
    last = num_layers - 1
    for index, rule in enumerate(rules):
        _check_ends(rule, _path(block, index), [layers[u] for u, i in enumerate(chosen) if i == index], last)
    return tuple(
        k if index is None else _of_layer(rules[index], k, layer, last, _path(block, index))
        for index, layer in zip(chosen, layers, strict=True)
    )


def common_number(block: SubnetworkConfig, k: int) -> int | None:
    """p of all units; None if there are rules, or neither coverage nor holders.

    Raises:
        ValueError: as `holders_of_units`.
    """
    if isinstance(block.holders, int):
        return _at_most(block.holders, k, f"{KEY}.holders")
    return whole_holders(block.coverage, k, f"{KEY}.coverage") if isinstance(block.coverage, float) else None


def _rules(block: SubnetworkConfig) -> Sequence[Rule]:
    rules = block.coverage if block.holders is None else block.holders
    assert isinstance(rules, tuple), "the block has one number or rules; a plan's are not asked for"
    return rules


def _path(block: SubnetworkConfig, index: int) -> str:
    return f"{KEY}.{'coverage' if block.holders is None else 'holders'}[{index}]"


def _refuse_idle(rule: Rule, path: str, names: Sequence[str]) -> None:
    if any(re.search(rule.units, name) for name in names):
        raise ValueError(f"{path}: earlier rules match all units that {rule.units!r} matches; the first one decides")
    raise ValueError(f"{path}.units: {rule.units!r} matches no unit; names are like {listed(names, limit=_MAX_NAMES)}")


def _check_ends(rule: Rule, path: str, layers: Sequence[int], last: int) -> None:
    if all(_is_end(layer, last, rule) for layer in layers):
        raise ValueError(
            f"{path}.whole_ends: got {rule.whole_ends}, which keeps all units of the rule whole, so that it decides "
            f"nothing: the model has {last + 1} layers; choose fewer, or for whole units say so by coverage 1.0"
        )


def _is_end(layer: int, last: int, rule: Rule) -> bool:
    return min(layer, last - layer) < rule.whole_ends


def _of_layer(rule: Rule, k: int, layer: int, last: int, path: str) -> int:
    """p of the units of a layer: in a profile, of the numbers that it may have the nearest, of two the larger."""
    first, final = (_share(number, rule, k, path) for number in rule.ends)
    if _is_end(layer, last, rule):
        return k
    if rule.profile is None:
        return int(first * k)
    share = first + (final - first) * Fraction(layer, max(1, last))
    steps = min(k, _STEPS)
    choices = [k * i // steps for i in range(steps, 0, -1)]
    return min(choices, key=lambda p: abs(Fraction(p, k) - share))


def _share(number: float, rule: Rule, k: int, path: str) -> Fraction:
    """Of the subnetworks; a profile's need not be whole numbers of holders."""
    if isinstance(rule, HoldersRule):
        return Fraction(_at_most(int(number), k, path), k)
    return Fraction(repr(number)) if rule.profile else Fraction(whole_holders(number, k, path), k)


def _at_most(holders: int, k: int, path: str) -> int:
    if holders > k:
        raise ValueError(
            f"{path}: got {holders}, but there are only {k} subnetworks; choose 1 to {k}, or start more ranks"
        )
    return holders


def whole_holders(coverage: float, k: int, path: str) -> int:
    """p of a coverage.

    Raises:
        ValueError: it is no whole number of k subnetworks, to four digits; with the nearest that are.
    """
    p = round(coverage * k)
    if p >= 1 and abs(coverage - p / k) <= 10**-_COVERAGE_DIGITS:
        return p
    nearest = sorted(range(1, k + 1), key=lambda n: abs(n / k - coverage))[:4]
    near = ", ".join(f"{round(n / k, _COVERAGE_DIGITS):g} (holders {n})" for n in sorted(nearest))
    raise ValueError(
        f"{path}: {coverage:g} of {k} subnetworks is {coverage * k:g} holders per unit, not a whole number; "
        f"nearest that are: {near}"
    )


def in_words(numbers: Sequence[int]) -> str:
    """How many holders units have: one number each, or different ones."""
    found = sorted({*numbers})
    if len(found) == 1:
        return f"{found[0]} holders each"
    return f"{found[0]} to {found[-1]} holders, {sum(numbers)} in all" if found else "no holders"
