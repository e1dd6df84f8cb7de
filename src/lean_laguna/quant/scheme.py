"""How one linear's weight is stored: number format, scales, and the tensors and bytes that they take.

What modules have which scheme is ``config``'s business; how codes become numbers is that of ``nvfp4``,
``fp8`` and ``integer``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

from lean_laguna.core.errors import ConfigError
from lean_laguna.core.safetensors_header import DTYPE_BITS

Number = Literal["fp4", "fp8", "int"]
Kind = Literal["fp4", "fp8", "int4", "int8"]
Strategy = Literal["tensor", "channel", "group", "block", "tensor_group"]
Spelling = Literal["compressed-tensors", "fp8", "modelopt"]
Activations = Literal["none", "dynamic", "static"]
Storage = Literal[
    "nvfp4-pack-quantized", "float-quantized", "int-quantized", "naive-quantized", "pack-quantized"
]

NVFP4_GROUP = 16
# Bytes an element of a stored tensor takes, by safetensors' name of its type.
ELEMENT_BYTES = {name: bits // 8 for name, bits in DTYPE_BITS.items() if bits % 8 == 0}
_WORD_BITS = 32


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a checkpoint: its shape and its type by safetensors' name."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        total = self.element_bytes
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True)
class WeightScheme:
    """How one linear's weight [N, K] is stored.

    Attributes:
        number: What a code stands for: ``fp4`` is e2m1, ``fp8`` is e4m3, ``int`` a whole number.
        num_bits: Of a code.
        strategy: Which weights share a scale: all, a row (``channel``), ``group_size`` along K (``group``), a
            ``block``, or groups below one scale of the tensor (``tensor_group``).
        storage: compressed-tensors' name of the layout.
        symmetric: Whether codes have no zero point.
        group_size: Of ``group`` and ``tensor_group``.
        block: Rows and columns of ``block``.
        activations: Whether the checkpoint means activations to be quantised too; weights are the same.
        spelling: Whose tensor names these are.
    """

    number: Number
    num_bits: int
    strategy: Strategy
    storage: Storage
    symmetric: bool = True
    group_size: int | None = None
    block: tuple[int, int] | None = None
    activations: Activations = "none"
    spelling: Spelling = "compressed-tensors"

    @property
    def kind(self) -> Kind:
        """What a code is, and of how many bits."""
        return cast(Kind, f"{self.number}{self.num_bits}" if self.number == "int" else self.number)

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Shape of ``weight_scale`` for a weight [rows, columns].

        Raises:
            ConfigError: The columns are not a multiple of the group size.
        """
        if self.strategy == "tensor":
            return (1,)
        if self.strategy == "channel":
            return (rows, 1)
        if self.strategy == "block":
            height, width = self.block or (1, 1)
            return (-(-rows // height), -(-columns // width))
        size = self.group_size or columns
        if columns % size:
            raise ConfigError(
                f"a weight of shape [{rows}, {columns}] cannot be stored in groups of {size}: its columns "
                f"must be a multiple; {columns} has the group sizes {_divisors(columns)}"
            )
        return (rows, columns // size)

    def tensors(self, rows: int, columns: int, scale_dtype: str = "BF16") -> dict[str, TensorSpec]:
        """Tensors that a weight [rows, columns] is stored as, by the last part of their names.

        Args:
            rows: N, outputs.
            columns: K, inputs.
            scale_dtype: Type of scales where the format leaves it open.

        Raises:
            ConfigError: The weight's shape does not fit the format.
        """
        scale = TensorSpec(self.scale_shape(rows, columns), scale_dtype)
        if self.number == "fp4":
            return self._fp4_tensors(rows, columns, scale.shape)
        names: dict[str, TensorSpec] = {}
        if self.storage == "pack-quantized":
            words = -(-columns * self.num_bits // _WORD_BITS)
            names["weight_packed"] = TensorSpec((rows, words), "I32")
            names["weight_scale"] = scale
            if not self.symmetric:
                packed = -(-rows * self.num_bits // _WORD_BITS)
                is_packed = self.strategy != "tensor"
                shape = (packed, scale.shape[1]) if is_packed else (1,)
                names["weight_zero_point"] = TensorSpec(shape, "I32" if is_packed else "I8")
            names["weight_shape"] = TensorSpec((2,), "I64")
        else:
            names["weight"] = TensorSpec((rows, columns), "F8_E4M3" if self.number == "fp8" else "I8")
            names["weight_scale_inv" if self.spelling == "fp8" else "weight_scale"] = scale
            if not self.symmetric:
                names["weight_zero_point"] = TensorSpec(scale.shape, "I8")
        if self.activations == "static":
            names["input_scale"] = TensorSpec((1,), scale_dtype)
        return names

    def _fp4_tensors(self, rows: int, columns: int, scale: tuple[int, ...]) -> dict[str, TensorSpec]:
        is_modelopt = self.spelling == "modelopt"
        names = {
            "weight" if is_modelopt else "weight_packed": TensorSpec((rows, columns // 2), "U8"),
            "weight_scale": TensorSpec(scale, "F8_E4M3"),
            "weight_scale_2" if is_modelopt else "weight_global_scale": TensorSpec((1,), "F32"),
        }
        if self.activations == "static":
            names["input_scale" if is_modelopt else "input_global_scale"] = TensorSpec((1,), "F32")
        return names

    def stored_bytes(self, rows: int, columns: int, scale_dtype: str = "BF16") -> int:
        """Bytes of all tensors that a weight [rows, columns] is stored as."""
        return sum(spec.num_bytes for spec in self.tensors(rows, columns, scale_dtype).values())

    def read_bytes(self, rows: int, columns: int, scale_dtype: str = "BF16") -> int:
        """Bytes that one product with a weight [rows, columns] reads: codes, scales and zero points."""
        return sum(
            spec.num_bytes
            for name, spec in self.tensors(rows, columns, scale_dtype).items()
            if name.startswith("weight") and name != "weight_shape"
        )

    @property
    def name(self) -> str:
        """A short name for people, such as ``NVFP4`` or ``INT4 group 128``."""
        if self.number == "fp4":
            return "NVFP4"
        kind = f"{'FP' if self.number == 'fp8' else 'INT'}{self.num_bits}"
        extra = {"group": f" {self.group_size}", "block": " " + "x".join(map(str, self.block or ()))}
        return (
            f"{kind} {self.strategy}{extra.get(self.strategy, '')}{'' if self.symmetric else ' asymmetric'}"
        )

    def weights_json(self) -> dict[str, Any]:
        """Return the ``weights`` entry of a group in compressed-tensors' ``quantization_config``."""
        # vLLM 0.25.1 fails over experts of integers whose group size is null; -1 is another word for it.
        is_row = self.storage == "pack-quantized" and self.strategy == "channel"
        written: dict[str, Any] = {
            "num_bits": self.num_bits,
            "type": "int" if self.number == "int" else "float",
            "symmetric": self.symmetric,
            "strategy": self.strategy,
            "group_size": -1 if is_row else self.group_size,
            "dynamic": False,
        }
        if self.block is not None:
            written["block_structure"] = list(self.block)
        if self.number == "fp4":
            written |= {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
        return written

    def activations_json(self) -> dict[str, Any] | None:
        """Return the ``input_activations`` entry, None where only weights are quantised.

        Raises:
            ConfigError: Activations with stored scales, which need data.
        """
        if self.activations == "none":
            return None
        if self.activations == "static":
            raise ConfigError(f"{self.name}: static activation scales need data; only weights are quantised")
        group = self.block[1] if self.block is not None else None
        return {
            "num_bits": 8,
            "type": "int" if self.number == "int" else "float",
            "symmetric": True,
            "strategy": "group" if group else "token",
            "group_size": group,
            "dynamic": True,
        }


NVFP4 = WeightScheme("fp4", 4, "tensor_group", "nvfp4-pack-quantized", group_size=NVFP4_GROUP)
FP8_TENSOR = WeightScheme("fp8", 8, "tensor", "float-quantized", activations="static")
FP8_CHANNEL = WeightScheme("fp8", 8, "channel", "float-quantized", activations="dynamic")
FP8_BLOCK = WeightScheme("fp8", 8, "block", "float-quantized", block=(128, 128), activations="dynamic")
INT8_CHANNEL = WeightScheme("int", 8, "channel", "int-quantized", activations="dynamic")


def packed_integer(num_bits: int, group_size: int | None, symmetric: bool = True) -> WeightScheme:
    """Return the weight-only integer scheme of a number of bits; without a group size, a scale per row."""
    strategy: Strategy = "channel" if group_size is None else "group"
    return WeightScheme("int", num_bits, strategy, "pack-quantized", symmetric, group_size)


def _divisors(columns: int) -> str:
    sizes = [size for size in (256, 128, 64, 32, 16, 8) if columns % size == 0]
    return ", ".join(map(str, sizes)) or "none in use"
