"""Kinds of the standard library that are rare in states and whose modules are slow to import."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from .kinds import DecodeContext, EncodeContext, Leaf, Tag, add, unsupported
from .plain import ints


def _load_decimal(payload: bytes, ctx: DecodeContext) -> Decimal:
    return Decimal(payload.decode("ascii"))


_MAX_FRACTION_BITS = 1 << 14  # to check that it is in lowest terms takes quadratic time


def _save_fraction(value: Fraction, ctx: EncodeContext) -> bytes:
    if _is_long(value.numerator, value.denominator):
        raise unsupported(
            f"is a Fraction with more than {_MAX_FRACTION_BITS:,} bits above or below the line",
            "save its numerator and denominator as integers, which may be of any size",
        )
    return ctx.pack([value.numerator, value.denominator])


def _is_long(*numbers: int) -> bool:
    return max(number.bit_length() for number in numbers) > _MAX_FRACTION_BITS


def _load_fraction(payload: bytes, ctx: DecodeContext) -> Fraction:
    numerator, denominator = ints(ctx.unpack(payload), 2)
    if _is_long(numerator, denominator):
        raise ValueError(f"more than {_MAX_FRACTION_BITS:,} bits")
    value = Fraction(numerator, denominator)
    if value.denominator != denominator:
        raise ValueError("not in lowest terms")
    return value


def _save_zone(value: ZoneInfo, ctx: EncodeContext) -> bytes:
    if value.key is None:
        raise unsupported("is a ZoneInfo without a key", "make it by name: ZoneInfo('Europe/Oslo')")
    return value.key.encode()


def _load_zone(payload: bytes, ctx: DecodeContext) -> ZoneInfo:
    key = payload.decode()
    try:
        return ZoneInfo(key)
    except (ZoneInfoNotFoundError, OSError) as error:  # the name of a directory of zones, or too long for a file
        what = f"needs the time zone {key[:100]!r}, which this machine does not know"
        raise unsupported(what, "pip install tzdata") from error


add(Leaf(Tag.DECIMAL, "Decimal", lambda value, ctx: str(value).encode("ascii"), _load_decimal), Decimal)
add(Leaf(Tag.FRACTION, "Fraction", _save_fraction, _load_fraction), Fraction)
add(Leaf(Tag.ZONEINFO, "ZoneInfo", _save_zone, _load_zone), ZoneInfo)
