"""The tiling key by name: which compiled kernel runs a plan.

Bit layout and the rule that says which keys exist are native (csrc/tiling/key.cpp) and not repeated here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fag_kernel import _native
from fag_metadata import MaskMode

TEMPLATES: Final = ("BN2GS1S2", "BN2", "unused", "BN2S2")
MASKS: Final = (MaskMode.NO_MASK, MaskMode.CAUSAL, MaskMode.SLIDING_WINDOW)
D_ALIGNS: Final = (64, 128, 192)
DV_ALIGNS: Final = (128, 192)


@dataclass(frozen=True)
class TilingKey:
    """A tiling key taken apart.

    Attributes:
        template: "BN2GS1S2" (tiles of a head over many cores) or "BN2" (a core owns whole heads).
        is_tnd: Packed layout.
        mask_mode: Mask compiled in.
        is_swizzle: Key columns are dealt across cores.
        d_align: Columns of q and k in the kernel: 64, 128 or 192.
        dv_align: Columns of v and the output: 128 or 192.
        is_multiblk: BN2 with several tiles per head.
        needs_zero: Outputs are cleared first, because some line of tiles is masked as a whole.

    Example:
        >>> key = TilingKey(mask_mode=MaskMode.CAUSAL, d_align=128)
        >>> key.encode(), key.name, TilingKey.decode(72) == key
        (72, 'BN2GS1S2-dense-causal-d128-dv128', True)
    """

    template: str = "BN2GS1S2"
    is_tnd: bool = False
    mask_mode: MaskMode = MaskMode.NO_MASK
    is_swizzle: bool = False
    d_align: int = 64
    dv_align: int = 128
    is_multiblk: bool = False
    needs_zero: bool = False

    def encode(self) -> int:
        """The key as a number; also for combinations without a kernel.

        Raises:
            ValueError: A field has a value that the key has no bits for.
        """
        return _native.encode_key(
            {
                "template_id": _code("template", TEMPLATES, self.template),
                "is_tnd": int(self.is_tnd),
                "mask": _code("mask_mode", MASKS, self.mask_mode),
                "is_swizzle": int(self.is_swizzle),
                "d_align": _code("d_align", D_ALIGNS, self.d_align),
                "dv_align": _code("dv_align", DV_ALIGNS, self.dv_align),
                "is_multiblk": int(self.is_multiblk),
                "needs_zero": int(self.needs_zero),
            }
        )

    @classmethod
    def decode(cls, key: int) -> TilingKey:
        """The fields of a key.

        Args:
            key: Number below 2048.

        Raises:
            ValueError: A bit above the fields is set, or a field holds a value without meaning.
        """
        fields = _native.decode_key(key)
        if fields["mask"] >= len(MASKS) or fields["d_align"] >= len(D_ALIGNS):
            raise ValueError(f"TilingKey.decode: key must have fields with a meaning, got {key} ({fields}).")
        return cls(
            template=TEMPLATES[fields["template_id"]],
            is_tnd=bool(fields["is_tnd"]),
            mask_mode=MASKS[fields["mask"]],
            is_swizzle=bool(fields["is_swizzle"]),
            d_align=D_ALIGNS[fields["d_align"]],
            dv_align=DV_ALIGNS[fields["dv_align"]],
            is_multiblk=bool(fields["is_multiblk"]),
            needs_zero=bool(fields["needs_zero"]),
        )

    @property
    def why_invalid(self) -> str:
        """Why no kernel exists for this key; empty if one does."""
        return _native.why_invalid_key(self.encode())

    @property
    def is_valid(self) -> bool:
        """Whether a kernel exists for this key."""
        return not self.why_invalid

    @property
    def name(self) -> str:
        """A readable form, such as BN2-dense-causal-d128-dv128-multiblk-zero."""
        mask = {MaskMode.NO_MASK: "full", MaskMode.CAUSAL: "causal", MaskMode.SLIDING_WINDOW: "window"}
        parts = [self.template, "tnd" if self.is_tnd else "dense", mask[self.mask_mode]]
        parts += ["swizzle"] * self.is_swizzle
        parts += [f"d{self.d_align}", f"dv{self.dv_align}"]
        parts += ["multiblk"] * self.is_multiblk + ["zero"] * self.needs_zero
        return "-".join(parts)


def _code(name: str, values: tuple[object, ...], value: object) -> int:
    if value not in values:
        choices = ", ".join(str(choice) for choice in values)
        raise ValueError(f"TilingKey: {name} must be one of {choices}, got {value}.")
    return values.index(value)


def valid_keys() -> tuple[int, ...]:
    """All keys for which a kernel exists, ascending: 32 of template BN2GS1S2 and 24 of BN2.

    Example:
        >>> len(valid_keys())
        56
    """
    return tuple(_native.valid_keys())
